"""Asks PyPI for known vulnerabilities of the pinned packages: `make audit`, or `make audit
ARGS='grpcio'`.

This is the only script that needs the network. It reports the packages that it could not ask about.
The exit code is 1 if a vulnerability is known, otherwise 0.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
INDEX = "https://pypi.org/pypi"
WAIT_S = 10.0
MOST_FAILURES = 3
"""After this many failures in a row, there is no network or no such registry, and the remaining
packages are skipped.
"""

Ask = Callable[[str, str], Sequence[Mapping[str, Any]]]
"""Returns the known vulnerabilities of a package's version. Raises OSError or ValueError if it
cannot ask.
"""


def pins(text: str) -> dict[str, str]:
    """Return the pinned versions of a constraints file, by package name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return dict(found)


def ask(name: str, version: str) -> Sequence[Mapping[str, Any]]:
    """Ask PyPI for the vulnerabilities of a package's version. Raises OSError or ValueError."""
    with urllib.request.urlopen(f"{INDEX}/{name}/{version}/json", timeout=WAIT_S) as answer:
        found = json.load(answer)
    return [one for one in found["vulnerabilities"] if not one.get("withdrawn")]


def audit(packages: Mapping[str, str], ask: Ask, say: Callable[[str], object]) -> int:
    """Ask about packages, given by name and version, and return how many vulnerabilities are
    known.
    """
    known, asked, row = 0, 0, 0
    not_asked: list[str] = []
    for name, version in packages.items():
        if row >= MOST_FAILURES:
            not_asked.append(name)
            continue
        try:
            found = ask(name, version)
        except (OSError, ValueError, KeyError) as error:
            row += 1
            code = f" ({error.code})" if isinstance(error, urllib.error.HTTPError) else ""
            not_asked.append(name + code)
        else:
            row, asked = 0, asked + 1
            for one in found:
                known += 1
                mended = ", ".join(one.get("fixed_in", ())) or "no version"
                what = f"{one.get('id')}: {one.get('summary') or ''}"
                say(f"{name} {version}: {what} (mended in {mended})")
    say(f"{asked} of {len(packages)} packages were asked about; {known} known vulnerabilities")
    if not_asked:
        say(f"could not be asked: {', '.join(not_asked)}")
    return known


def main() -> int:
    """Run the command."""
    packages = pins(CONSTRAINTS.read_text())
    if names := sys.argv[1:]:
        missing = sorted(set(names) - set(packages))
        if missing:
            print(f"audit: not pinned: {', '.join(missing)}", file=sys.stderr)
            return 2
        packages = {name: packages[name] for name in names}
    return 1 if audit(packages, ask, print) else 0


if __name__ == "__main__":
    sys.exit(main())
