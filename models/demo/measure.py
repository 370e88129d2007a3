"""Measures the demo model on prompts that were kept out of its training, and writes the card's
table.

    heldout.jsonl ──prompts──▶ headrace-server ──replies──▶ marks ──▶ table
                                     │ token ids
                                     ▼
                  drafts: how much of a reply its own prompt predicts
    corpus.Writer(990001), or a file ──texts──▶ transformers, float32 ──▶ nats per byte

Replies come from the server as a user would get them, with its chat template and its tool call
parser, so the measurement covers what is actually served. They are greedy. Only the kind `form`
constrains a reply, with a JSON schema. Whether the model calls a tool, and which one, is its own
choice. Losses are per byte, so that models with different tokenizers can be compared.

Lines of heldout.jsonl have `messages`, `max_tokens`, `expect`, and `tools` or `schema` if needed:

    call     {"name", "arguments"}: exactly one call, of this tool, with these arguments
    no_call  {"call": false}: an answer without any call
    result   {"contains"}: an answer without any call that has each of these strings
    copy     {"text"}: this text; `size` is 30 or 60, its length in tokens, roughly
    edit     {"text"}: this text
    form     {"object"}: this object

The prompts and their words must not be used in training, and must not change once a model has
been measured with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import headrace
from scores import (
    DRAFT_TOKENS,
    DRAFTED_COPIES,
    SUFFIX_TOKENS,
    Drafted,
    Reply,
    Tally,
    drafted,
    drafted_rows,
    marks,
    tallied,
)

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "heldout.jsonl"
CARD = HERE / "README.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->"
SERVER = "from service.command.entry import main; main()"
"""The `headrace-server` command, even if this Python is not first on PATH."""
READY_S = 120.0

KINDS = ("call", "no_call", "result", "copy", "edit", "form")
DRAFTS, STORIES = "drafts", "stories"
PARTS = (*KINDS, DRAFTS, STORIES)

STORY_SEED, STORY_COUNT = 990001, 200

MEANINGS = {
    "right tool": "Calls the one right tool",
    "whole call": "… and with the right arguments",
    "no call": "Calls none where none fits",
    "answer": "Answers with what the tool returned",
    "copy 30": "Copies about 30 tokens exactly",
    "copy 60": "Copies about 60 tokens exactly",
    "edit": "Copies with one change, exactly",
    "fields": "Fills a schema: fields right",
    "object": "Fills a schema: all fields right",
}


class MeasureError(Exception):
    """The reason why this cannot be measured, in words for the user."""


# ---- replies -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(model: Path) -> AsyncIterator[str]:
    """Run a server of a model with this Python for the duration of the block, and yield its
    address.

    Raises:
        MeasureError: it ended before it accepted requests, or did not accept any for `READY_S`.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-measure-") as folder:
        address = f"unix:{folder}/socket"
        server = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, "serve", "--model", str(model), "--listen", address,
            "--log-level", "warning",
        )  # fmt: skip
        ended = asyncio.create_task(server.wait())
        try:
            async with headrace.AsyncClient(address) as client:
                ready = asyncio.create_task(client.wait_until_ready(timeout=READY_S))
                await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done():
                    ready.cancel()
                    raise MeasureError(f"the server of {model} ended at its start: see above")
                try:
                    ready.result()
                except headrace.HeadraceError as error:
                    raise MeasureError(
                        f"the server of {model} takes no requests: {error}"
                    ) from None
            yield address
        finally:
            if not ended.done():
                server.terminate()
            await ended


async def ask(target: str, rows: Sequence[dict[str, Any]]) -> list[Reply]:
    """Send all prompts to a server, many concurrently, and return the replies in order.

    Raises:
        MeasureError: the server cannot be reached or failed. A refused prompt becomes a reply with
            `error`.
    """
    done = 0

    async def one(session: headrace.AsyncSession, row: dict[str, Any]) -> Reply:
        nonlocal done
        try:
            result = await session.submit(
                row["messages"],
                max_tokens=row["max_tokens"],
                temperature=0,
                tools=row.get("tools"),
                json_schema=row.get("schema"),
            )
        except headrace.InvalidArgumentError as error:  # of this prompt alone
            reply = Reply(error=str(error))
        else:
            calls = tuple((call.name, call.arguments_json) for call in result.tool_calls)
            reply = Reply(result.text, calls, result.token_ids)
        done += 1
        if sys.stderr.isatty() or done == len(rows):
            end = "\n" if done == len(rows) else ""
            print(f"\r{done} of {len(rows)} prompts answered", end=end, file=sys.stderr, flush=True)
        return reply

    try:
        async with headrace.AsyncClient(target) as client, client.session() as session:
            return await asyncio.gather(*(one(session, row) for row in rows))
    except headrace.HeadraceError as error:
        raise MeasureError(f"the server at {target}: {error}") from None


async def tokens(target: str, texts: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the token ids of texts and conversations, as the server sees them. Raises
    MeasureError.
    """
    try:
        async with headrace.AsyncClient(target) as client:
            return [(await client.tokenize(text)).token_ids for text in texts]
    except headrace.HeadraceError as error:
        raise MeasureError(f"the server at {target}: {error}") from None


# ---- stories -----------------------------------------------------------------------------------


def story_texts(file: Path | None) -> list[str]:
    """Return the texts of a file of JSON lines with "text", or freshly written ones of the
    corpus.
    """
    if file is not None:
        return [json.loads(line)["text"] for line in file.read_text().splitlines() if line.strip()]
    from corpus import Writer  # beside this file; its text is read when it is needed

    writer = Writer(STORY_SEED)
    texts: list[str] = []
    while len(texts) < STORY_COUNT:
        text = getattr(writer.document(), "text", None)
        if text:
            texts.append(text)
    return texts


def nats_per_byte(model: Path, texts: Sequence[str]) -> float:
    """Return a model's loss on texts after `<|bos|>`, in nats per byte of UTF-8."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loss, size = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        longest = weights.config.max_position_embeddings
        if len(ids) >= longest:
            raise MeasureError(
                f"a text of {len(ids)} tokens is longer than the context of {model}, {longest}:"
                " divide it"
            )
        row = torch.tensor([[tokenizer.bos_token_id, *ids]])
        with torch.inference_mode():
            loss += float(weights(row, labels=row).loss) * len(ids)
        size += len(text.encode())
    return loss / size


# ---- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """All measurements.

    Attributes:
        tallies: the tallies by criterion.
        copies: how many tokens the texts have, for each size of copy.
        drafts: the drafts by what the prompt asks for.
        texts: how many texts the losses cover.
        losses: nats per byte, by the model's role.
    """

    tallies: dict[str, Tally]
    copies: dict[int, list[int]]
    drafts: dict[str, Drafted]
    texts: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    def table(self) -> str:
        """Return the measurements in Markdown."""
        parts = []
        if self.tallies:
            parts.append(["| | prompts | right |", "|---|---:|---:|"])
            for name, meaning in MEANINGS.items():
                if name in self.tallies:
                    tally = self.tallies[name]
                    parts[-1].append(f"| {meaning} | {tally.of} | {tally.share:.1%} |")
        told = "; ".join(
            f"of about {size}: {min(counts)} to {max(counts)}, the middle one {median(counts):.0f}"
            for size, counts in self.copies.items()
        )
        if told:
            parts.append([f"Texts to copy, in tokens of this model: {told}."])
        if self.drafts:
            parts.append(
                ["| Drafts from the text so far | tokens drafted | kept | tokens a step |"]
            )
            parts[-1].append("|---|---:|---:|---:|")
            for name, count in [
                *self.drafts.items(),
                ("both", sum(self.drafts.values(), Drafted())),
            ]:
                share = count.kept / max(1, count.drafted)
                speed = count.output / max(1, count.steps)
                parts[-1].append(f"| {name} | {count.drafted} | {share:.1%} | {speed:.2f} |")
        if self.losses:
            parts.append([f"| Loss on {self.texts} texts | nats per byte |", "|---|---:|"])
            parts[-1] += [f"| {name} | {loss:.4f} |" for name, loss in self.losses.items()]
        return "\n\n".join("\n".join(lines) for lines in parts)


def about_the_run() -> str:
    """Return a line with the date, the machine, and the versions that the measurements depend
    on.
    """
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    torch, transformers = map(importlib.metadata.version, ("torch", "transformers"))
    return (
        f"Measured on {datetime.date.today().isoformat()}, {name}, {os.cpu_count()} CPUs,"
        f" torch {torch}, transformers {transformers}, by `python models/demo/measure.py`."
    )


def rewritten(card: str, block: str) -> str:
    """Return a card's text with everything between its markers replaced.

    Raises:
        MeasureError: it does not have both markers.
    """
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MeasureError(f"{CARD} needs the lines {BEGIN.strip()} and {END} to write between")
    return f"{before}{begin}{block}\n{end}{after}"


# ---- the command -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements, and the judged replies with their prompts."""

    figures: Figures
    pairs: list[tuple[dict[str, Any], Reply]]


async def measured(rows: Sequence[dict[str, Any]], parts: set[str], target: str) -> Measured:
    """Send a server the prompts that the parts need, and tally the replies."""
    drafts = drafted_rows(rows) if DRAFTS in parts else []
    wanted = [row for row in rows if row["kind"] in parts or row in drafts]
    replies = await ask(target, wanted)
    pairs = [(row, reply) for row, reply in zip(wanted, replies, strict=True)]
    found: dict[str, Drafted] = {}
    prompts = await tokens(target, [row["messages"] for row in drafts])
    outputs = {row["id"]: reply.token_ids for row, reply in pairs}
    for row, prompt in zip(drafts, prompts, strict=True):
        name = "edits" if row["kind"] == "edit" else "copies"
        found[name] = found.get(name, Drafted()) + drafted(prompt, outputs[row["id"]])
    copies = [row for row in wanted if row["kind"] == "copy" and "copy" in parts]
    sizes: dict[int, list[int]] = {}
    texts = await tokens(target, [row["expect"]["text"] for row in copies])
    for row, ids in zip(copies, texts, strict=True):
        sizes.setdefault(row["size"], []).append(len(ids))
    judged = [(row, reply) for row, reply in pairs if row["kind"] in parts]
    return Measured(Figures(tallied(judged), sizes, found), judged)


async def run(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Measured:
    """Measure what the command line asks for."""
    parts = set(arguments.kinds)
    found = Measured(Figures({}, {}, {}), [])
    if parts - {STORIES}:
        async with contextlib.AsyncExitStack() as stack:
            target = arguments.target or await stack.enter_async_context(served(arguments.model))
            found = await measured(rows, parts, target)
    if STORIES in parts:
        texts = story_texts(arguments.stories)
        models = [arguments.model, *([arguments.baseline] if arguments.baseline else [])]
        names = ["this model", "the model to compare with"]
        losses = {
            name: nats_per_byte(model, texts) for name, model in zip(names, models, strict=False)
        }
        figures = replace(found.figures, texts=len(texts), losses=losses)
        found = replace(found, figures=figures)
    return found


def failures(pairs: Iterable[tuple[dict[str, Any], Reply]]) -> Iterable[str]:
    """Yield a line of JSON for each prompt whose reply is at least partly wrong."""
    for row, reply in pairs:
        if min(marks(row, reply).values()) < 1:
            told = {key: row[key] for key in ("id", "kind", "messages", "expect")}
            told |= {"text": reply.text, "calls": reply.calls}
            yield json.dumps(
                told | ({"error": reply.error} if reply.error else {}), ensure_ascii=False
            )


def chosen(text: str) -> list[str]:
    """Return the parts in a comma-separated list."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


def command() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Measure a demo model on heldout.jsonl, greedily, and print the figures as"
        " Markdown. A server of the model is started for it, and ended behind it.",
        epilog="Parts: call, no_call, result, copy, edit, form: the prompts of this kind. drafts:"
        f" how much of its replies to all edits and {2 * DRAFTED_COPIES} copies the text so far"
        " foretells, where what followed the latest earlier occurrence of its last"
        f" {SUFFIX_TOKENS[1]} to {SUFFIX_TOKENS[0]} tokens, up to {DRAFT_TOKENS} tokens, is"
        " proposed. stories: the loss on plain texts.",
    )
    add = parser.add_argument
    add("--model", type=Path, default=HERE, metavar="DIR", help="the model; default: this folder")
    add(
        "--target",
        help="ask this running server instead of one of --model, host:port or unix:/path",
    )
    add("--baseline", type=Path, metavar="DIR", help="another model whose loss on stories is told")
    add("--stories", type=Path, metavar="FILE", help='texts, JSON lines with "text"; default:'
        f" {STORY_COUNT} of the corpus, seed {STORY_SEED}")  # fmt: skip
    add("--kinds", type=chosen, default=list(PARTS), metavar="LIST", help="parts, with commas;"
        f" default: {','.join(PARTS)}")  # fmt: skip
    add("--prompts", type=Path, default=HELD_OUT, metavar="FILE", help="default: heldout.jsonl")
    add("--failures", type=Path, metavar="FILE", help="write what went wrong, as JSON lines")
    add("--write", action="store_true", help="put the figures in README.md; wants all parts")
    return parser


def main() -> None:
    """Run the command."""
    parser = command()
    arguments = parser.parse_args()
    if arguments.write and set(arguments.kinds) != set(PARTS):
        parser.error("--write wants all parts: leave out --kinds")
    try:
        if arguments.write:
            rewritten(CARD.read_text(), "")  # what would fail behind minutes of work fails now
        rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
        found = asyncio.run(run(arguments, rows))
        figures = found.figures.table()
        print(figures)
        if arguments.failures:
            lines = list(failures(found.pairs))
            arguments.failures.write_text("".join(f"{line}\n" for line in lines))
        refused = [reply.error for _, reply in found.pairs if reply.error]
        if refused:
            print(f"{len(refused)} prompts were refused: {refused[0]}", file=sys.stderr)
        if arguments.write:
            CARD.write_text(rewritten(CARD.read_text(), f"{about_the_run()}\n\n{figures}"))
    except (MeasureError, OSError, ValueError) as error:
        sys.exit(f"measure.py: {error}")


if __name__ == "__main__":
    main()
