#!/usr/bin/env bash
# Makes the Maven artefact of the Java library, in a repository of files: FOLDER/maven/dev/headrace/headrace-client/ with its
# jar, its sources, its Javadoc and its pom. A project that names file://FOLDER/maven as a repository takes it from there; its
# dependencies are in Maven Central. The version is that of clients/java/pom.xml.
#
#   scripts/packages-java.sh [FOLDER]      default: dist/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p "${1:-dist/packages}"
out=$(cd "${1:-dist/packages}" && pwd)/maven
rm -rf "$out" # what an earlier build has left, Maven would keep beside the new one
cd clients/java
mvn -q -B -ntp -DskipTests -Dmaven.install.skip=true "-DaltDeploymentRepository=headrace::file://$out" deploy >&2
ls "$out"/dev/headrace/headrace-client/*/*.jar
