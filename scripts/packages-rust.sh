#!/usr/bin/env bash
# Makes the Rust crate, as `cargo publish` would send it: dist/packages/headrace-VERSION.crate. It is not built here;
# tests/clients/rust builds the quick start with it.
#
#   scripts/packages-rust.sh [FOLDER]      default: dist/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-dist/packages}
mkdir -p "$out"
out=$(cd "$out" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
(cd clients/rust && cargo package --quiet --locked --no-verify --allow-dirty --package headrace --target-dir "$built")
cp "$built"/package/headrace-*.crate "$out"/
ls "$out"/headrace-*.crate
