"""The bill of materials of an image, as CycloneDX 1.6: Debian's packages from its dpkg, and
Python's from their metadata.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DPKG = ("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${Architecture}\t${Maintainer}\n")
_PYTHON = """
import importlib.metadata as m, json
found = [(d.version, d.metadata) for d in m.distributions()]
print(json.dumps([[f["Name"], v, f.get("License-Expression") or ""] for v, f in found]))
"""


def inside(root: Path, *command: str) -> str:
    """Run a command of the image and return its output."""
    run = ["chroot", str(root), "env", "PATH=/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin"]
    return subprocess.run([*run, *command], check=True, capture_output=True, text=True).stdout


def of_debian(listing: str, release: str) -> list[dict[str, Any]]:
    """Return the components in the output of dpkg-query."""
    found = []
    for line in listing.splitlines():
        name, version, architecture, maintainer = line.split("\t")
        place = f"{quote(name)}@{quote(version, safe='')}?arch={architecture}&distro={release}"
        found.append(
            {
                "type": "library",
                "bom-ref": f"pkg:deb/debian/{place}",
                "supplier": {"name": maintainer},
                "name": name,
                "version": version,
                "purl": f"pkg:deb/debian/{place}",
            }
        )
    return found


def of_python(packages: list[list[str]]) -> list[dict[str, Any]]:
    """Return the components for names, versions and licences from package metadata."""
    found = {}
    for name, version, licence in sorted(packages):
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version, safe='')}"
        found[purl] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            **({"licenses": [{"expression": licence}]} if licence else {}),
        }
    return list(found.values())


def bill(root: Path, *, name: str, version: str, image: str, when: str) -> dict[str, Any]:
    """Return the whole document.

    Args:
        root: the image's file system.
        name: the image's name.
        version: the software's version.
        image: the image's id.
        when: the time of the build, ISO 8601.
    """
    system = dict(
        line.split("=", 1)
        for line in (root / "etc/os-release").read_text().splitlines()
        if "=" in line
    )
    release = "-".join(system[key].strip('"') for key in ("ID", "VERSION_ID"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, image)}",
        "version": 1,
        "metadata": {
            "timestamp": when,
            "component": {
                "type": "container",
                "bom-ref": image,
                "name": name,
                "version": version,
            },
        },
        "components": [
            *of_debian(inside(root, *_DPKG), release),
            *of_python(json.loads(inside(root, "python3", "-c", _PYTHON))),
        ],
    }
