#!/usr/bin/env bash
# Wheels for a machine without network: Linux x86-64 with glibc 2.31 or newer, Python 3.11 and 3.12.
#   scripts/device_check/pack.sh FOLDER [with-torch]
# There: python3 -m pip install --no-index --find-links FOLDER -r scripts/device_check/requirements.txt
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:?the folder to put wheels into}
wanted=(-r requirements.txt)
[ "${2:-}" != with-torch ] || wanted+=("torch==2.13.0" --extra-index-url https://download.pytorch.org/whl/cpu)
platforms=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
for minor in $(seq 31 -1 5); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
for version in 3.11 3.12; do
  ${PYTHON:-python3} -m pip download --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --dest "$folder" "${wanted[@]}"
done
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1)"
