"""Lists of requirements for pip, of which the image and its lock are made.

dependencies.py names PYPROJECT...        what these projects depend on, without each other, and
                                          what their extra `openai` needs
dependencies.py locked LOCK               what LOCK pins, with hashes
dependencies.py locked LOCK --no-torch    the same without torch and its CUDA packages
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_OF_CUDA = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")


def names(paths: list[Path]) -> Iterator[str]:
    """The requirements of some pyproject.toml files, one a line."""
    projects = [tomllib.loads(path.read_text("utf-8"))["project"] for path in paths]
    own = {project["name"] for project in projects}
    found = {requirement for project in projects for requirement in project["dependencies"]}
    for project in projects:
        found.update(project.get("optional-dependencies", {}).get("openai", ()))
    for requirement in sorted(found):
        if re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] not in own:
            yield f"{requirement}\n"


def locked(path: Path, *, torch: bool) -> Iterator[str]:
    """The entries of a lock: a line `name==version`, and below it, indented, its hashes."""
    wanted = True
    for line in path.read_text("utf-8").splitlines(keepends=True):
        if not line.startswith(" "):
            wanted = torch or not _OF_CUDA.match(line)
        if wanted:
            yield line


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("names", "locked"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--no-torch", action="store_true")
    given = parser.parse_args()
    if given.what == "names":
        sys.stdout.writelines(names(given.paths))
    else:
        for path in given.paths:
            sys.stdout.writelines(locked(path, torch=not given.no_torch))


if __name__ == "__main__":
    main()
