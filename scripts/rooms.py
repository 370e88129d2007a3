"""Counts the rooms of the house (`python scripts/rooms.py`; `--names` tells what stands twice;
`--document` writes the rooms in docs/architecture.md, from their heads).

A **room** is a folder of engine/ or service/, or a module beside such folders; a package's own
`__init__` is one if it imports anything. An **arrow** is a room that imports another, no matter how
often or where, including inside functions and only for type checkers. A room's **floor** is the
length of the longest import chain below it. A **circle** is a set of modules that all reach each
other by such imports: of all Python, and of the Rust and the TypeScript client. **Neighbours** are
top-level folders that import each other.

The script also counts words: the share of docstrings in the engine's non-blank lines, the
docstrings that only refer to another one ("See X."), and the files and public classes of the
engine, the service and the Python client that share a name.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "service")
TOPS = ("engine", "service", "benchmarks", "tests", "scripts")
CLIENT = Path("clients/python/src")
DOCUMENT = ROOT / "docs" / "architecture.md"
GENERATED = re.compile(r"(^|/)(v1|gen|proto)/|_pb2")
SEE = re.compile(r"See\s+(the base class|\S+(\s+(and|of)\s+\S+)*)")
"""A docstring that only says where to look."""

Graph = Mapping[str, set[str]]
"""Maps each module or room to the names of those that it imports."""


@dataclass(frozen=True, slots=True)
class House:
    """A package's rooms.

    Attributes:
        arrows: the rooms that each room imports.
        flat: the files at the package's top.
    """

    arrows: Graph
    flat: int

    @property
    def floor_of(self) -> dict[str, int]:
        """Return the length of each room's longest import chain, in rooms. The rooms of a circle
        are on the same floor.
        """
        found = groups(self.arrows)  # what is imported comes first
        group = {room: index for index, one in enumerate(found) for room in one}
        floors: list[int] = []
        for index, one in enumerate(found):
            below = {group[other] for room in one for other in self.arrows[room]} - {index}
            floors.append(1 + max((floors[other] for other in below), default=0))
        return {room: floors[index] for room, index in group.items()}

    @property
    def floors(self) -> int:
        """Return the number of floors."""
        return max(self.floor_of.values(), default=0)


def python_files() -> dict[str, Path]:
    """Return all of our modules by name, except generated ones."""
    found: dict[str, Path] = {}
    bases = [(ROOT, name) for name in TOPS]
    bases += [(ROOT / CLIENT, name) for name in ("headrace", "headrace_command")]
    for base, name in bases:
        for path in sorted((base / name).rglob("*.py")):
            if not GENERATED.search(str(path.relative_to(base))):
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def python_imports(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which of the other modules each module imports."""
    return {name: set(_imported(name, path, modules)) - {name} for name, path in modules.items()}


def _imported(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            wanted = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for one in wanted:
            if one.startswith("headrace.v1"):  # generated
                continue
            while one and one not in modules:
                one = one.rpartition(".")[0]
            if one:
                yield one


def rust_imports() -> dict[str, set[str]]:
    """Return which of the other modules each module of the Rust client imports, without its
    tests.
    """
    base = ROOT / "clients/rust/src"
    names = {
        "::".join(p for p in path.relative_to(base).with_suffix("").parts if p != "mod"): path
        for path in base.rglob("*.rs")
        if not GENERATED.search(str(path.relative_to(base)))
    }
    names.pop("lib", None)
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        text = path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
        wanted = re.findall(r"\bcrate::([a-z_]+(?:::[a-z_]+)*)", text)
        parent = name.rpartition("::")[0]
        wanted += [f"{parent}::{one}" for one in re.findall(r"\bsuper::([a-z_]+)", text)]
        wanted += [parent] if re.search(r"\bsuper::[A-Z{*]", text) else []
        wanted += [f"{name}::{one}" for one in re.findall(r"(?m)^\s*(?:pub )?mod ([a-z_]+);", text)]
        found[name] = {_longest(one, "::", names) for one in wanted} - {name, ""}
    return found


def _longest(name: str, separator: str, names: Iterable[str]) -> str:
    known = set(names)
    while name and name not in known:
        name = name.rpartition(separator)[0]
    return name


def typescript_imports() -> dict[str, set[str]]:
    """Return which of the other modules each module of the TypeScript client imports, including
    types.
    """
    base = (ROOT / "clients/typescript/src").resolve()
    paths = [p for p in base.rglob("*.ts") if not GENERATED.search(str(p.relative_to(base)))]
    return {
        str(path.relative_to(base)): {
            str(target.relative_to(base))
            for one in re.findall(r"""from\s+["'](\.[^"']+)\.js["']""", path.read_text("utf-8"))
            if (target := (path.parent / f"{one}.ts").resolve()) in paths
        }
        for path in paths
    }


def groups(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, each after those that it reaches (Sharir, 1981)."""
    seen: set[str] = set()
    ends = [one for name in sorted(graph) for one in _ends_from(name, graph, seen)]
    back: dict[str, set[str]] = {name: set() for name in ends}
    for name in ends:
        for other in graph.get(name, ()):
            back[other].add(name)
    seen = set()
    found = [_ends_from(name, back, seen) for name in reversed(ends)]
    return [sorted(one) for one in reversed(found) if one]


def _ends_from(name: str, graph: Graph, seen: set[str]) -> list[str]:
    """Return what is reachable from a name and was not seen before, in postorder."""
    ends: list[str] = []
    path = [] if name in seen else [(name, iter(sorted(graph.get(name, ()))))]
    seen.add(name)
    while path:
        here, others = path[-1]
        other = next((one for one in others if one not in seen), None)
        if other is None:
            ends.append(here)
            path.pop()
        else:
            seen.add(other)
            path.append((other, iter(sorted(graph.get(other, ())))))
    return ends


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups that have several modules."""
    return [one for one in groups(graph) if len(one) > 1]


def house(package: str, modules: Mapping[str, Path], imports: Graph) -> House:
    """Return the rooms of a package."""
    arrows: defaultdict[str, set[str]] = defaultdict(set)
    for name in modules:
        if name.partition(".")[0] == package and (name != package or imports[name]):
            room = _room(name)
            arrows[room] |= {
                _room(other) for other in imports[name] if other.partition(".")[0] == package
            } - {room}
    return House(dict(arrows), len(list((ROOT / package).glob("*.py"))))


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def document(modules: Mapping[str, Path], imports: Graph) -> str:
    """Return docs/architecture.md with a table of each package's rooms, the highest floor first."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for package in PACKAGES:
        one = house(package, modules, imports)
        rows = ["| floor | room | what it is |", "|---|---|---|"]
        for room in sorted(one.arrows, key=lambda room: (-one.floor_of[room], room)):
            head = ast.get_docstring(ast.parse(modules[room].read_text(encoding="utf-8"))) or ""
            told = " ".join(head.partition("\n\n")[0].split())
            rows.append(f"| {one.floor_of[room]} | `{room}` | {told} |")
        begin, end = f"<!-- rooms of {package} -->", f"<!-- end of {package} -->"
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, *rows, end + rest.partition(end)[2]])
    return text


def neighbours(imports: Graph) -> list[tuple[str, str]]:
    """Return the top-level folders that import each other."""
    tops = {
        (name.partition(".")[0], other.partition(".")[0])
        for name, others in imports.items()
        for other in others
    }
    return sorted((a, b) for a, b in tops if a < b and (b, a) in tops)


def docstrings(package: str) -> tuple[float, int]:
    """Return the share of docstrings in a package's non-blank lines, and how many docstrings only
    refer to another one. The strings after a constant's or a field's definition count.
    """
    lines = documented = see = 0
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines += sum(1 for line in text.splitlines() if line.strip())
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            for one in body if isinstance(body, list) else ():
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    documented += (one.end_lineno or one.lineno) - one.lineno + 1
                    see += SEE.fullmatch(one.value.value.strip().rstrip(".")) is not None
    return documented / lines, see


def twice(modules: Mapping[str, Path]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the names of files and of public classes that occur more than once in what we deliver,
    with their modules.
    """
    files: defaultdict[str, list[str]] = defaultdict(list)
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in modules.items():
        if name.partition(".")[0] not in (*PACKAGES, "headrace", "headrace_command"):
            continue
        if path.name not in ("__init__.py", "__main__.py"):
            files[path.name].append(name)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    return (
        {name: where for name, where in sorted(files.items()) if len(where) > 1},
        {name: where for name, where in sorted(classes.items()) if len(where) > 1},
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", action="store_true", help="tell which names stand twice")
    parser.add_argument("--document", action="store_true", help="write docs/architecture.md")
    options = parser.parse_args()
    modules = python_files()
    imports = python_imports(modules)
    if options.document:
        DOCUMENT.write_text(document(modules, imports), encoding="utf-8")
    say = sys.stdout.write
    for package in PACKAGES:
        one = house(package, modules, imports)
        count = sum(map(len, one.arrows.values()))
        share, see = docstrings(package)
        say(
            f"{package}: {len(one.arrows)} rooms on {one.floors} floors, {count} arrows, "
            f"{one.flat} files flat; {share:.1%} docstrings, {see} that only name another\n"
        )
    for graph in (imports, rust_imports(), typescript_imports()):
        for circle in circles(graph):
            say(f"circle: {', '.join(circle)}\n")
    for pair in neighbours(imports):
        say(f"neighbours: {' and '.join(pair)}\n")
    files, classes = twice(modules)
    say(f"{len(files)} names of files and {len(classes)} of public classes stand twice\n")
    if options.names:
        for name, where in [*files.items(), *classes.items()]:
            say(f"  {name}: {', '.join(where)}\n")


if __name__ == "__main__":
    main()
