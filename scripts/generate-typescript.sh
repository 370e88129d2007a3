#!/usr/bin/env bash
# Generates the TypeScript stubs: protos -> clients/typescript/src/gen.
#
#   scripts/generate-typescript.sh            writes them
#   scripts/generate-typescript.sh --check    only compares them with what would be written; exit 1 if they differ
#
# buf compiles the protos and runs a local plugin, so the result depends on the protos and the plugin's version alone:
# @bufbuild/protoc-gen-es, pinned in clients/typescript/package-lock.json and installed by `npm ci`. Beside headrace.v1
# it generates google.rpc.Status, the messages in its details (ErrorInfo, BadRequest, RetryInfo) and the options that the
# protos use (google.api), because no npm package of the runtime has them; and of clients/typescript/protos gRPC's health
# service, which is not part of the contract.
#
# Variable: BUF, the buf to use (default: the one in .venv, else the one on the PATH).
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

package=clients/typescript
committed=$package/src/gen

case "${1:-}" in
  "") check=false ;;
  --check) check=true ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

if [[ -z "${BUF:-}" ]]; then
  if [[ -x .venv/bin/buf ]]; then BUF=.venv/bin/buf; else BUF=buf; fi
fi
for tool in npm "$BUF"; do
  command -v "$tool" >/dev/null || { echo "$0: $tool is not installed" >&2; exit 2; }
done

# npm writes what it installed into node_modules/.package-lock.json, after everything else.
if [[ ! $package/node_modules/.package-lock.json -nt $package/package-lock.json ]]; then
  npm ci --prefix "$package" --no-audit --no-fund >&2
fi

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
template="{
  \"version\": \"v2\",
  \"plugins\": [{
    \"local\": \"$PWD/$package/node_modules/.bin/protoc-gen-es\",
    \"out\": \"$out\",
    \"opt\": [\"target=ts\", \"import_extension=js\"]
  }]
}"
"$BUF" generate --template "$template" \
  --path protos/headrace --path protos/third_party/google/rpc --path protos/third_party/google/api
"$BUF" generate --template "$template" "$package/protos"

if $check; then
  if ! diff -ru "$committed" "$out"; then
    echo "$committed is not what the protos generate: run scripts/generate-typescript.sh and commit the result" >&2
    exit 1
  fi
  echo "$committed is up to date"
else
  rm -rf "$committed"
  mkdir -p "$committed"
  cp -R "$out"/. "$committed"/
  echo "wrote $committed"
fi
