#!/usr/bin/env bash
# Makes the wheel and the source archive of the Python client: FOLDER/headrace-VERSION….whl and .tar.gz.
#
#   scripts/packages-python.sh PYTHON [FOLDER]      PYTHON: of an environment; FOLDER: default dist/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 out=${2:-dist/packages}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Built apart: setuptools would leave its folders among the sources, and take up what lies there.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard -- clients/python | xargs -0 cp --parents -t "$work"
cp LICENSE "$work/clients/python/"
"$python" -m pip install --disable-pip-version-check --quiet -c constraints.txt uv
"$python" -m uv build --quiet --system-certs --out-dir "$work/out" "$work/clients/python"
cp "$work"/out/headrace-* "$out"
(cd "$out" && ls -1 headrace-[0-9]*)
