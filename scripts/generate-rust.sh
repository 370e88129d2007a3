#!/usr/bin/env bash
# Generates the Rust code of the contract: protos -> clients/rust/src/proto/*.rs.
#
#   scripts/generate-rust.sh            writes it
#   scripts/generate-rust.sh --check    only compares it with what would be written; exit 1 if it differs
#
# buf compiles the protos to a descriptor set, of which clients/rust/generate makes the code with tonic-prost-build and
# prettyplease, pinned in clients/rust/Cargo.lock; so the result depends on the protos and these alone, and neither we nor
# the crate's users need protoc.
#
# Variable: BUF, the buf to use (default: the one in .venv, else the one on the PATH).
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

committed=clients/rust/src/proto

case "${1:-}" in
  "") check=false ;;
  --check) check=true ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

if [[ -z "${BUF:-}" ]]; then
  if [[ -x .venv/bin/buf ]]; then BUF=.venv/bin/buf; else BUF=buf; fi
fi
for tool in cargo "$BUF"; do
  command -v "$tool" >/dev/null || { echo "$0: $tool is not installed" >&2; exit 2; }
done

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
mkdir "$out/proto"
"$BUF" build -o "$out/descriptors.binpb"
(cd clients/rust && cargo run --quiet --locked --package headrace-generate -- "$out/descriptors.binpb" "$out/proto")

if $check; then
  if ! diff -ru --exclude=mod.rs "$committed" "$out/proto"; then
    echo "$committed is not what the protos generate: run scripts/generate-rust.sh and commit the result" >&2
    exit 1
  fi
  echo "$committed is up to date"
else
  find "$committed" -name '*.rs' ! -name mod.rs -delete
  cp "$out"/proto/*.rs "$committed"/
  echo "wrote $committed"
fi
