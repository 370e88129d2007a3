#!/usr/bin/env bash
# Generates the Go stubs: protos/headrace/v1/*.proto -> clients/go/headrace/v1/*.pb.go.
#
#   scripts/generate-go.sh            writes them
#   scripts/generate-go.sh --check    only compares them with what would be written; exit 1 if they differ
#
# buf compiles the protos and runs local plugins, so the result depends on the protos and the plugins' versions alone.
# The plugins are installed into .tools/bin, which git ignores. google.rpc.Status is not generated: its go_package
# names the module google.golang.org/genproto/googleapis/rpc, which clients/go/go.mod requires.
#
# Variables: BUF, the buf to use (default: the one in .venv, else the one on the PATH); GO, the go to use.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The version of the runtime in clients/go/go.mod: generated code and runtime belong together.
protoc_gen_go=v1.36.12
protoc_gen_go_grpc=v1.6.2
committed=clients/go/headrace/v1
module=headrace.dev/go

case "${1:-}" in
  "") check=false ;;
  --check) check=true ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

go="${GO:-go}"
if [[ -z "${BUF:-}" ]]; then
  if [[ -x .venv/bin/buf ]]; then BUF=.venv/bin/buf; else BUF=buf; fi
fi
for tool in "$go" "$BUF"; do
  command -v "$tool" >/dev/null || { echo "$0: $tool is not installed" >&2; exit 2; }
done

# Installs the plugin of the package $1 at the version $2, unless it is there (one of them prints "v1", the other "1").
tools="$PWD/.tools/bin"
install_plugin() {
  local name="${1##*/}"
  local version
  version="$("$tools/$name" --version 2>/dev/null || true)"
  if [[ "v${version##*[ v]}" != "$2" ]]; then
    GOBIN="$tools" "$go" install "$1@$2"
  fi
}
install_plugin google.golang.org/protobuf/cmd/protoc-gen-go "$protoc_gen_go"
install_plugin google.golang.org/grpc/cmd/protoc-gen-go-grpc "$protoc_gen_go_grpc"

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
"$BUF" generate --path protos/headrace --template "{
  \"version\": \"v2\",
  \"plugins\": [
    {\"local\": \"$tools/protoc-gen-go\", \"out\": \"$out\", \"opt\": [\"module=$module\"]},
    {\"local\": \"$tools/protoc-gen-go-grpc\", \"out\": \"$out\", \"opt\": [\"module=$module\"]}
  ]
}"

if $check; then
  if ! diff -ru "$committed" "$out/headrace/v1"; then
    echo "$committed is not what the protos generate: run scripts/generate-go.sh and commit the result" >&2
    exit 1
  fi
  echo "$committed is up to date"
else
  mkdir -p "$committed"
  rm -f "$committed"/*.pb.go
  cp "$out"/headrace/v1/*.pb.go "$committed"/
  echo "wrote $committed"
fi
