#!/usr/bin/env bash
# The first hour on a graphics card in one command, without network, in less than ten minutes:
#   scripts/device_check.sh [--emulated] [--out FOLDER] [--only STAGE...]
# Builds the extension where it is not there, then runs the stages of scripts/device_check/stages.py, each with a
# time limit of its own, and writes FOLDER/device_check.json and .txt. Exit code 0: every stage was ok.
# --emulated: the same stages, small, on the emulated device. What it needs beyond this repository is listed in
# scripts/device_check/requirements.txt; scripts/device_check/pack.sh fetches that as wheels.
# It has not run on a card so far.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! "$python" -c 'import strata._C' 2>/dev/null && ! "$python" -c 'import pybind11, setuptools' 2>/dev/null; then
  echo "$python lacks what builds the extension: $python -m pip install -r scripts/device_check/requirements.txt" >&2
  exit 2
fi
"$python" -c 'import strata._C' 2>/dev/null || timeout 240 "$python" setup.py -q build_ext --inplace
exec "$python" -m device_check "$@"
