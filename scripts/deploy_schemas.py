"""Writes tests/deploy/schemas: JSON schemas of the kinds that deploy/ uses, from the Go modules of
the projects that define them.

Needs go, which downloads the modules. Descriptions and definitions that no kind refers to are left
out. Unknown fields are forbidden, as a strict API server forbids them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "deploy" / "schemas"
KUBERNETES = {"oldest": "v1.30.14", "newest": "v1.37.2"}
KINDS = ("Deployment", "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service")
CRDS = {
    "sigs.k8s.io/gateway-api@v1.4.0": (
        "config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml"
    ),
    "github.com/kedacore/keda/v2@v2.21.0": "config/crd/bases/keda.sh_scaledobjects.yaml",
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"
    ),
}
COMPOSE = "github.com/compose-spec/compose-go/v2@v2.16.2"
_LEFT_OUT = {"description", "example", "default", "externalDocs"}


def module(name: str) -> Path:
    """Return the folder where go has stored a module."""
    said = subprocess.run(
        ["go", "mod", "download", "-json", name], check=True, capture_output=True, text=True
    )
    return Path(json.loads(said.stdout)["Dir"])


def strict(schema: Any) -> Any:
    """Convert a schema to a strict JSON schema that forbids unknown fields and has no
    descriptions.
    """
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: strict(one) for name, one in value.items()}
        elif not key.startswith("x-kubernetes") and not (
            key in _LEFT_OUT and isinstance(value, (str, dict, int, float, list, bool))
        ):
            found[key] = strict(value)
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in found and "additionalProperties" not in found and not open_ended:
        found["additionalProperties"] = False
    return found


def reached(definitions: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return these definitions and all that they refer to, directly or not."""
    found: dict[str, Any] = {}
    while names:
        name = names.pop()
        if name in found:
            continue
        found[name] = strict(definitions[name])
        text = json.dumps(found[name])
        names += [part.partition('"')[0] for part in text.split('"#/definitions/')[1:]]
    return found


def of_kubernetes(version: str) -> dict[str, Any]:
    """Return the schemas of KINDS, by apiVersion and kind."""
    path = module(f"k8s.io/kubernetes@{version}") / "api" / "openapi-spec" / "swagger.json"
    definitions = json.loads(path.read_text("utf-8"))["definitions"]
    kinds = {}
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            if kind["kind"] in KINDS and kind["version"] == "v1":
                group = f"{kind['group']}/v1".removeprefix("/")
                kinds[f"{group}/{kind['kind']}"] = name
    return {"kinds": kinds, "definitions": reached(definitions, list(kinds.values()))}


def of_crds() -> dict[str, Any]:
    """Return the schemas of the custom resources that deploy/ uses, in the same way."""
    kinds, definitions = {}, {}
    for name, path in CRDS.items():
        spec = yaml.safe_load((module(name) / path).read_text("utf-8"))["spec"]
        kind = spec["names"]["kind"]
        version = next(one for one in spec["versions"] if one["storage"])
        kinds[f"{spec['group']}/{version['name']}/{kind}"] = kind
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        definitions[kind] = schema
    return {"kinds": kinds, "definitions": definitions}


def write(name: str, schemas: Any) -> None:
    """Write a file with one line for each definition."""
    if "definitions" not in schemas:
        (FOLDER / name).write_text(json.dumps(schemas, sort_keys=True) + "\n")
        return
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
        for key, value in sorted(schemas["definitions"].items())
    ]
    text = ",\n".join(lines)
    kinds = json.dumps(schemas["kinds"], sort_keys=True)
    (FOLDER / name).write_text(f'{{"kinds": {kinds},\n"definitions": {{\n{text}\n}}}}\n')


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, version in KUBERNETES.items():
        write(f"kubernetes-{name}.json", of_kubernetes(version))
    write("others.json", of_crds())
    compose = module(COMPOSE) / "schema" / "compose-spec.json"
    (FOLDER / "compose.json").write_text(compose.read_text("utf-8"))
    versions = [
        *(f"k8s.io/kubernetes@{version}" for version in KUBERNETES.values()), *CRDS, COMPOSE,
    ]  # fmt: skip
    listed = "".join(f"- {version}\n" for version in versions)
    (FOLDER / "README.md").write_text(
        "Written by `scripts/deploy_schemas.py` from these Go modules, all of which have the "
        f"Apache License 2.0:\n\n{listed}"
    )


if __name__ == "__main__":
    main()
