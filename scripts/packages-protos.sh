#!/usr/bin/env bash
# Makes the bundle from which code for any language is generated: FOLDER/headrace-protos-REVISION.tar.gz with the contract's
# protos, those that they import, and their descriptor set (headrace.binpb, with comments).
#
#   scripts/packages-protos.sh BUF [FOLDER]      BUF: the program; FOLDER: default dist/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

buf=$1 out=${2:-dist/packages}
revision=$(sed -n 's/^SCHEMA_REVISION.*= \([0-9]*\)$/\1/p' service/convert/model.py)
[[ $revision =~ ^[0-9]+$ ]] || { echo "$0: no SCHEMA_REVISION in service/convert/model.py" >&2; exit 1; }
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=headrace-protos-$revision
"$buf" export . --output "$work/$name"
"$buf" build --output "$work/$name/headrace.binpb"
cp protos/README.md LICENSE "$work/$name/"
# The same sources make the same file.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@1767225600 -C "$work" -cf - "$name" | gzip -n >"$out/$name.tar.gz"
echo "$out/$name.tar.gz"
