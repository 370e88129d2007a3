"""Prints what the given pyproject.toml files depend on, without each other: pip's requirements for
the image's dependencies, which are installed before the sources are there.
"""

import re
import sys
import tomllib
from pathlib import Path


def main(paths: list[str]) -> None:
    """Print the requirements, one a line."""
    projects = [tomllib.loads(Path(path).read_text("utf-8"))["project"] for path in paths]
    own = {project["name"] for project in projects}
    found = {requirement for project in projects for requirement in project["dependencies"]}
    for requirement in sorted(found):
        if re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] not in own:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
