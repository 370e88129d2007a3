#!/usr/bin/env bash
# Generate the Python stubs (messages, services, and their types) from protos/.
#
#   generate-python.sh VENV           write them to clients/python/src/headrace/v1
#   generate-python.sh VENV --check   compare them with what is committed; exit 1 if they differ
#
# VENV has the packages of protos/requirements.txt: the oldest supported generator, since generated code refuses
# runtimes that are older than its generator.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${1:?usage: generate-python.sh VENV [--check]}
target=clients/python/src
out=$target
if [ "${2:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi

PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc \
  -Iprotos -Iprotos/third_party \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  protos/headrace/v1/*.proto 2>/dev/null
# A file of messages alone has no services: its empty *_pb2_grpc files say nothing.
rm -f "$out"/headrace/v1/{generation,capability}_pb2_grpc.{py,pyi}

if [ "$out" != "$target" ]; then
  if ! diff -r -x __init__.py -x __pycache__ "$out/headrace/v1" "$target/headrace/v1"; then
    echo "The committed Python stubs are not those of protos/: run 'make protos' and commit the result." >&2
    exit 1
  fi
  echo "Python stubs are up to date"
fi
