#!/usr/bin/env bash
# Makes the Go module as a proxy serves it: FOLDER/go/headrace.dev/go/@v/ with its list, .info, .mod and .zip. With
#
#   GOPROXY=file://FOLDER/go,https://proxy.golang.org GONOSUMDB=headrace.dev
#
# `go get headrace.dev/go/headrace` takes it from there. The version is that of clients/go/headrace/options.go.
#
#   scripts/packages-go.sh [FOLDER]      default: dist/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-dist/packages}/go/headrace.dev/go/@v
version=v$(sed -n 's/^const Version = "\(.*\)"$/\1/p' clients/go/headrace/options.go)
[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+ ]] || { echo "$0: no version in clients/go/headrace/options.go" >&2; exit 1; }
mkdir -p "$out"
cp clients/go/go.mod "$out/$version.mod"
printf '{"Version": "%s", "Time": "2026-01-01T00:00:00Z"}\n' "$version" >"$out/$version.info"
printf '%s\n' "$version" >"$out/list"

# The same sources make the same file: sorted, and of one time. What git ignores is no source.
python3 - "$out/$version.zip" "headrace.dev/go@$version" <<'EOF'
import subprocess
import sys
import zipfile
from pathlib import Path

target, prefix = sys.argv[1:]
listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "clients/go"]
told = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
paths = [Path(name) for name in told.split("\0") if name]
files = {path.relative_to("clients/go").as_posix(): path for path in paths if path.is_file()}
files["LICENSE"] = Path("LICENSE")
with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
    for name in sorted(files):
        entry = zipfile.ZipInfo(f"{prefix}/{name}", (2026, 1, 1, 0, 0, 0))
        entry.compress_type = zipfile.ZIP_DEFLATED
        made.writestr(entry, files[name].read_bytes())
EOF
echo "$out/$version.zip"
