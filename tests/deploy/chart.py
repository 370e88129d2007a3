"""Renders deploy/helm by Helm, which is in .tools/bin or installed; else its tests are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.service.readme import ROOT

CHART = ROOT / "deploy" / "helm"
HELM = shutil.which("helm", path=str(ROOT / ".tools" / "bin")) or shutil.which("helm")
NEEDS_HELM = pytest.mark.skipif(
    HELM is None, reason="Helm is not installed (scripts/install-helm.sh)"
)


class RefusedError(Exception):
    """Helm does not render these values; the message is its own."""


def rendered(values: dict[str, Any] | None = None, *options: str) -> list[dict[str, Any]]:
    """The objects that the chart makes of some values, and of options of Helm's command.

    Raises:
        RefusedError: they are not usable.
    """
    assert HELM is not None
    ran = subprocess.run(
        [HELM, "template", "it", str(CHART), "--namespace", "here", "--kube-version", "1.34",
         "--values", "-", *options],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
    )  # fmt: skip
    if ran.returncode:
        raise RefusedError(ran.stderr)
    return [thing for thing in yaml.safe_load_all(ran.stdout) if thing]


def only(things: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [thing for thing in things if thing["kind"] == kind]
    return found
