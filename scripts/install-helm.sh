#!/usr/bin/env bash
# Installs Helm, which renders deploy/helm in tests, into .tools/bin by go: a minute or two.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .tools/bin/helm ] || GOBIN="$PWD/.tools/bin" go install helm.sh/helm/v3/cmd/helm@v3.22.0
