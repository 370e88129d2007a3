"""The commands `headrace-server pull`, `models` and `rm`: the models on this disk.

    pull ID    ─▶ engine.hub.fetching ─▶ progress on stderr, the directory or file on stdout
    models     ─▶ engine.hub.cache, and the loader's verdict on each model without its weights
    rm ID      ─▶ engine.hub.cache

Exit codes: 0 for success; 1 for a failure, explained on stderr; 2 for a mistake in the command
line; 130 if interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from engine.contract.errors import HeadraceError

_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130
_ID = typer.Argument(metavar="ID", help="OWNER/NAME on the hub, or OWNER/NAME@REVISION.")
_ID_OR_FILE = typer.Argument(
    metavar="ID",
    help="OWNER/NAME on the hub, OWNER/NAME@REVISION, or of a GGUF file OWNER/NAME:FILE.gguf or "
    "OWNER/NAME:Q4_K_M.",
)


def pull(
    model: Annotated[str, _ID_OR_FILE],
    revision: Annotated[
        str | None, typer.Option(help="A branch, a tag or a commit. Default: main.")
    ] = None,
) -> None:
    """Download a model, as serve does if it is not here.

    Says first what comes, under which licence, and whether the disk has room. Only files that are
    used come. After Ctrl-C the same command goes on where it was. Prints the model's directory, or
    the GGUF file.
    """
    named, colon, file = model.partition(":")
    if revision is not None and "@" in named:
        _fail("give the revision once: by --revision, or behind the @", _MISUSED)
    # Imported here, so that --help is fast.
    from engine.hub.cache import HubId, find_unmarked
    from engine.hub.fetching import fetch
    from service.logs.bar import columns_of, sink_for

    def say(line: str) -> None:
        typer.echo(line, err=True)

    def draw(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    fd = sys.stderr.fileno()
    sink = sink_for(say, os.isatty(fd), draw, lambda: columns_of(fd))
    try:
        wanted = HubId.parse(model if revision is None else f"{named}@{revision}{colon}{file}")
        path = fetch(wanted, sink, check=_check)
        if find_unmarked(wanted) is None:
            _fail(f"{wanted} was removed while it came")
    except HeadraceError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        draw("\n" if os.isatty(fd) else "")
        say("interrupted: what has come stays, and the same command goes on from there")
        os._exit(_INTERRUPTED)  # without waiting for threads that wait for the hub
    say(f"{wanted} is here: headrace-server serve --model {wanted}")
    typer.echo(path)


def _check(path: Path) -> None:
    from engine.loading.checkpoint import check_before_weights  # torch takes seconds to import

    check_before_weights(path)


def models() -> None:
    """List the models on this disk, and whether each would be served."""
    from engine.contract.startup import size_text
    from engine.hub.cache import cache_folder, partial_bytes, scan
    from engine.hub.gguf_names import models_in, parts_of

    found = scan()
    rows: list[tuple[str, ...]] = [("MODEL", "SIZE", "REVISION", "SERVED")]
    for repo in sorted(found.repos if found is not None else (), key=lambda one: one.repo_id):
        if repo.repo_type != "model":
            continue
        for one in sorted(repo.revisions, key=lambda one: -one.last_modified):
            names = ", ".join(sorted(one.refs))
            commit = one.commit_hash[:12]
            which = f"{names} ({commit})" if names else commit
            sizes = {
                str(file.file_path.relative_to(one.snapshot_path)): file.size_on_disk
                for file in one.files
            }
            files = models_in(sizes)
            for name in files:
                size = sum(sizes.get(part, 0) for part in parts_of(name))
                verdict = _verdict(one.snapshot_path / name)
                rows.append((f"{repo.repo_id}:{name}", size_text(size), which, verdict))
            if not files or any(name.endswith(".safetensors") for name in sizes):
                size = one.size_on_disk
                rows.append((repo.repo_id, size_text(size), which, _verdict(one.snapshot_path)))
        if partial := partial_bytes(repo.repo_path):
            told = "no: its download was interrupted; headrace-server pull goes on with it"
            rows.append((repo.repo_id, size_text(partial), "incomplete", told))
    if len(rows) == 1:
        typer.echo(f"no models in {cache_folder()}: headrace-server pull OWNER/NAME brings one")
        return
    for line in _columns(rows):
        typer.echo(line)


def _verdict(path: Path) -> str:
    """Return whether the loader would accept the model, judging by what it checks before reading
    weights.
    """
    from engine.loading.checkpoint import read_checkpoint, resolve_path

    try:
        read_checkpoint(resolve_path(str(path), lambda _: None))
    except HeadraceError as error:
        return "no: " + str(error).replace(f"{path}/", "").removeprefix(f"{path}: ")
    return "yes"


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def rm(
    model: Annotated[str, _ID],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model with all its revisions from this disk.

    Refused while a server serves it. Without a terminal to ask at, it wants --yes.
    """
    from engine.contract.startup import size_text
    from engine.hub.cache import HubId, remove

    try:
        wanted = HubId.parse(model)
        if model != wanted.repo:
            _fail("a model is removed with all its revisions and files: give OWNER/NAME", _MISUSED)
        if not yes and wanted.folder.is_dir():
            if not sys.stdin.isatty():
                _fail(f"nobody can be asked whether {wanted.repo} may go: give --yes", _MISUSED)
            typer.confirm(f"Remove {wanted.repo} from {wanted.folder.parent}?", abort=True)
        freed = remove(wanted)
    except (HeadraceError, OSError) as error:
        _fail(str(error))
    typer.echo(f"removed {wanted.repo}: {size_text(freed)}")


def _fail(why: str, code: int = _FAILED) -> None:
    typer.echo(f"headrace-server: {why}", err=True)
    raise typer.Exit(code)
