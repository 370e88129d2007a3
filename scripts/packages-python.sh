#!/usr/bin/env bash
# Makes the packages of the Python client and of the server, each as a source archive and as wheels:
#
#   scripts/packages-python.sh PYTHON [FOLDER [PART…]]      PYTHON: of an environment; FOLDER: default dist/packages
#
#   client    headrace-VERSION….tar.gz and -py3-none-any.whl
#   server    headrace_server-VERSION….tar.gz and -py3-none-any.whl, which has the kernels' sources alone
#   kernels   headrace_server-VERSION-py3-none-manylinux_2_28_x86_64.whl, with the kernels for CPUs: minutes of compiling
#
# Without a PART: all. The same sources and the same compiler give the same bytes.
#
# No older C library is needed for manylinux_2_28, which is torch's own platform: the kernels call so little of glibc and of
# C++'s runtime that a library made on a newer system asks for nothing newer. auditwheel tells; if it does not agree, there is
# no wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 out=${2:-dist/packages}
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- client server kernels
platform=manylinux_2_28_x86_64
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Built apart: setuptools would leave its folders among the sources, and take up what lies there. Times and permissions are
# those of the commit, not of the checkout.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}"
umask 022
git ls-files -z --cached --others --exclude-standard -- LICENSE README.md pyproject.toml setup.py engine service models/demo \
  clients/python | xargs -0 cp --parents -t "$work"
cp LICENSE "$work/clients/python/"
chmod -R u=rwX,go=rX "$work"
find "$work" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
"$python" -m pip install --disable-pip-version-check --quiet -c constraints.txt uv
uv() { "$python" -m uv "$@"; }

# Reads what auditwheel says, and fails unless the wheel runs wherever its tag says.
fits='
import json, re, sys
said, wanted = json.load(sys.stdin), sys.argv[1]
glibc = [re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag) for tag in (said["overall_tag"], wanted)]
if not all(glibc) or int(glibc[0][1]) > int(glibc[1][1]):
    needs = json.dumps(said["versioned_symbols"])
    sys.exit("no {} wheel: its library is for {}; it needs {}".format(wanted, said["overall_tag"], needs))
'

build() { # SOURCE [OPTION…]
  uv build --system-certs --build-constraints constraints.txt --out-dir "$work/out" "$@" >"$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; exit 1; }
}

for part in "$@"; do
  case "$part" in
    client) build "$work/clients/python" ;;
    server)
      build --sdist "$work"
      build --wheel -C--build-option=--plat-name=any "$work" ;;
    kernels)
      [ "$(uname -sm)" = "Linux x86_64" ] || { echo "no $platform wheel: it is made on Linux on x86-64" >&2; exit 1; }
      build --wheel "-C--build-option=--plat-name=$platform" "$work"
      uv tool run --quiet --system-certs --constraints constraints.txt auditwheel show --json "$work"/out/*-"$platform.whl" |
        "$python" -c "$fits" "$platform" ;;
    *) echo "$part is no part; there are client, server and kernels" >&2; exit 2 ;;
  esac
done

# setuptools writes the time and the user into source archives.
for archive in "$work"/out/*.tar.gz; do
  [ -e "$archive" ] || continue
  mkdir "$work/again"
  tar -xzf "$archive" -C "$work/again"
  tar -c --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work/again" "$(ls "$work/again")" | gzip -9n >"$archive"
  rm -r "$work/again"
done
cp "$work"/out/headrace* "$out"
ls -1 "$work/out"
