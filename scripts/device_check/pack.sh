#!/usr/bin/env bash
# Wheels for a machine without network: Linux x86-64, Python 3.11 and 3.12.
#   scripts/device_check/pack.sh FOLDER [with-torch]
# There: python3 -m pip install --no-index --find-links FOLDER -r scripts/device_check/requirements.txt
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:?the folder to put wheels into}
wanted=(-r requirements.txt)
[ "${2:-}" != with-torch ] || wanted+=("torch==2.13.0" --extra-index-url https://download.pytorch.org/whl/cpu)
for version in 3.11 3.12; do
  ${PYTHON:-python3} -m pip download --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$folder" "${wanted[@]}"
done
