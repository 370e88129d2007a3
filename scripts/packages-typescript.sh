#!/usr/bin/env bash
# Makes the npm tarball of the TypeScript library: dist/packages/headrace-client-VERSION.tgz.
#
#   scripts/packages-typescript.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-dist/packages}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd clients/typescript
# npm writes what it installed into node_modules/.package-lock.json, after everything else.
if [[ ! node_modules/.package-lock.json -nt package-lock.json ]]; then
  npm ci --no-audit --no-fund >&2
fi
npm pack --silent --pack-destination "$out"
