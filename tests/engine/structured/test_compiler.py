"""What is refused, how soon, and what a compilation may cost others."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.contract.errors import (
    CompileQueueFullError,
    EngineUnavailableError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from engine.contract.request import TokenMatcher
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import CallerKey, TokenId
from engine.structured import GrammarCompiler, compilation, root
from engine.structured.compilation import CompiledRoot
from engine.structured.matcher import CompiledGrammar, GrammarMatcher
from engine.structured.trial import Trial
from engine.text import Tokenizer
from tests.engine.structured.conftest import V, form
from tests.engine.structured.following import allowed

NONE: frozenset[int] = frozenset()
SCHEMA, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK
WAIT = 20.0


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def optional_parts(count: int) -> str:
    return " ".join('("a"|"b")?' for _ in range(count))


def doubled(times: int) -> str:
    lines = [f"P{i}: P{i + 1} P{i + 1}\nQ{i}: Q{i + 1} Q{i + 1}" for i in range(times)]
    return "\n".join(["start: T", "T: P0 Q0", *lines, f'P{times}: "a"?', f'Q{times}: "a"'])


AMBIGUOUS = r"""start: a*
a: b b b b | b b b | b b | b
b: "a" | " " | "e" | b b
"""
"""What its masks cost grows with every token, from a fifth of a millisecond to a second."""


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (SCHEMA, "{", "is not valid JSON: "),
        (SCHEMA, '{"minimum": NaN}', "NaN is no JSON number"),
        (SCHEMA, "[]", "is neither a JSON object nor true or false"),
        (SCHEMA, "false", "allows no value: anyOf is empty"),
        (SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
        (SCHEMA, '{"then": {}, "contains": {}}', '"contains", "then"'),
        (SCHEMA, '{"properties": {"a": {"if": {}}}}', 'not supported: "if"'),
        (SCHEMA, '{"type": "string", "pattern": "("}', "a group is not closed"),
        (SCHEMA, '{"type": "string", "pattern": "b*(?=a)"}', "look-around"),
        (SCHEMA, '{"oneOf": [{"type": "string"}, {"maxLength": 2}]}', "use anyOf"),
        (SCHEMA, '{"$ref": "http://example.com/schema"}', "another document"),
        (SCHEMA, '{"$ref": "#/$defs/none"}', "'/$defs/none' does not exist"),
        (SCHEMA, '{"$ref": "#"}', "matches no text"),
        (
            SCHEMA,
            '{"type": "string", "minLength": 3, "maxLength": 1}',
            "allows no value: minLength (3)",
        ),
        (SCHEMA, '{"x-guidance": {"lenient": true}}', "x-guidance"),
        (SCHEMA, nested(97), "deeper than 96"),
        (SCHEMA, nested(20_000), "deeper than 96"),
        (SCHEMA, '{"type": "integer", "multipleOf": 99999989}', "multipleOf"),
        (SCHEMA, '{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}', "multipleOf"),
        (SCHEMA, json.dumps({"pattern": "a?" * 9000}), "18000 bytes of patterns"),
        (SCHEMA, json.dumps({"enum": [f"v{i}" for i in range(19_000)]}), "too complex"),
        (REGEX, "(a", "a group is not closed"),
        (REGEX, "a{0}", "the empty text alone"),
        (REGEX, "[a&&b]", "matches no text"),
        (REGEX, "a(?!b)", "look-around"),
        (REGEX, "a?" * 2000 + "a" * 2000, "too complex"),
        (REGEX, "(" * 1000 + "a" + ")" * 1000, "nested parentheses"),
        (REGEX, "a" * 17_000, "17000 bytes; at most 16384"),
        (LARK, "start: " + '"a" ' * 16_384, "65543 bytes; at most 65536"),
        (LARK, "start: x", 'in line 1: unknown name: "x"'),
        (LARK, 'start: "a"\nother: [', "cannot be compiled in line"),
        (LARK, 'begin: "a"', "no rule called start"),
        (LARK, 'start: start "a"', "matches no text"),
        (LARK, 'start: "a"\nstart: "b"', "in line 2"),
        (LARK, 'start: %json {"type": "object"}', "use a json_schema"),
        (LARK, "start: " + optional_parts(3000), "too complex"),
        (LARK, doubled(16), "too complex"),
        (LARK, AMBIGUOUS, "too complex"),
        (REGEX, "(a{1,1000}){1,1000}", "too complex"),
        (REGEX, r"((\w{1,50} ){1,50}){1,50}", "too complex"),
        (LARK, "start: " + " | ".join(["/a/"] * 20_000), "at most 65536"),
    ],
)
def test_refusals(compiler: GrammarCompiler, kind: GrammarKind, text: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(form(kind, text), NONE)
    assert time.monotonic() - begin < 5
    assert caught.value.field == f"grammar.{kind.value}"
    assert message in caught.value.description
    assert len(str(caught.value)) < 450
    assert "%llguidance" not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        form(SCHEMA, "true"),
        form(SCHEMA, ' {"type": "number", "minimum": 0.1, "multipleOf": 0.01} '),
        form(SCHEMA, '{"minItems": 5000000000}'),
        form(SCHEMA, json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(256)}})),
        form(SCHEMA, json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
        form(REGEX, "(a|b)*a(a|b){200}"),
        form(REGEX, "((((a{1000}){1000}){1000}){1000})"),
        form(LARK, 'start: start "a" | "b"'),
        form(LARK, 's: s s s | "a" | ""\nstart: s'),
        form(GrammarKind.CHOICE, tuple(f"choice {i}" for i in range(15_000))),
        form(GrammarKind.CHOICE, tuple("a" * i for i in range(1, 700))),
    ],
)
def test_hard_forms_that_are_taken(compiler: GrammarCompiler, params: GrammarParams) -> None:
    begin = time.monotonic()
    make_matcher = compiler.compile(params, NONE)
    assert time.monotonic() - begin < 5
    assert allowed(make_matcher(), V)


def lark_chain(count: int) -> GrammarParams:
    lines = [f"r{i}:r{i + 1}" for i in range(count)]
    return form(LARK, "\n".join(["start:r0", *lines, f'r{count}:"y"']))


def terminal_chain(count: int) -> GrammarParams:
    lines = [f"R{i}:R{i + 1}" for i in range(count)]
    return form(LARK, "\n".join(["start:R0", *lines, f'R{count}:"y"']))


def schema_chain(count: int) -> GrammarParams:
    definitions: dict[str, object] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    definitions[f"a{count}"] = {"const": 1}
    return form(SCHEMA, json.dumps({"$defs": definitions, "$ref": "#/$defs/a0"}))


@pytest.mark.parametrize(
    "params",
    [lark_chain(5000), terminal_chain(5000), schema_chain(5500)],
    ids=["rules", "terminals", "refs"],
)
def test_long_chains_of_definitions_do_not_overflow_a_stack(
    compiler: GrammarCompiler, params: GrammarParams
) -> None:
    """Within the bounds of size; on a stack of usual size the process would die here."""
    matcher = compiler.compile(params, NONE)()
    assert allowed(matcher, V)


def test_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, V, max_cached=2)
    seen: list[str] = []
    real = LLMatcher.grammar_from_regex

    def count(text: str) -> str:
        seen.append(text)
        return real(text)

    monkeypatch.setattr(LLMatcher, "grammar_from_regex", count, raising=False)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(form(REGEX, text), NONE)
    assert seen == ["a", "b", "c", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_what_compiles_gives_way_to_the_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V)
    seen: list[int] = []
    real = compiler._compile

    def look(params: GrammarParams) -> LLMatcher:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(params)

    monkeypatch.setattr(compiler, "_compile", look)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    compiler.compile(form(REGEX, "a"), NONE)
    assert seen[0] > ours or ours == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours


class Held:
    """Compilations that a test lets go on, one by one, by their text."""

    def __init__(self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.entered = threading.Semaphore(0)
        self.gates: dict[str, threading.Event] = {}
        real = compiler._compile

        def compile_held(params: GrammarParams) -> LLMatcher:
            self.begun.append(params.text)
            gate = self.gates.get(params.text)
            self.entered.release()
            if gate is not None:
                assert gate.wait(WAIT)
            return real(params)

        monkeypatch.setattr(compiler, "_compile", compile_held)

    def hold(self, text: str) -> threading.Event:
        return self.gates.setdefault(text, threading.Event())


def test_an_overrunning_compilation_blocks_nobody_for_ever(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, time_limit_s=0.3, workers=1, max_waiting=1)
    held = Held(compiler, monkeypatch)
    gate = held.hold("slow")
    slow = compiler.begin(form(REGEX, "slow"), NONE)
    assert held.entered.acquire(timeout=WAIT)
    behind = compiler.begin(form(REGEX, "behind"), NONE)
    crowded = compiler.begin(form(REGEX, "crowded"), NONE)
    with pytest.raises(CompileQueueFullError, match="too many") as full:
        crowded.result(0)
    assert (full.value.limit, full.value.present, full.value.waited_s) == (1, 1, 0)
    assert full.value.retry_after_s > 0
    with pytest.raises(InvalidRequestError, match=r"regex: takes longer than 0.3 s"):
        slow.result(WAIT)
    with pytest.raises(CompileQueueFullError, match=r"not come within 0.3 s") as late:
        behind.result(WAIT)
    assert (late.value.limit, late.value.present, late.value.waited_s) == (1, 1, 0.3)
    assert late.value.retry_after_s > 0
    # What nobody waits for holds no place; the thread is free again, and the slow one was kept.
    new = compiler.begin(form(REGEX, "new"), NONE)
    gate.set()
    assert callable(new.result(WAIT))
    assert callable(compiler.begin(form(REGEX, "slow"), NONE).result(0))
    assert held.begun == ["slow", "new"]


def test_a_full_queue_s_advice_is_the_rate_at_which_forms_leave_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    compiler = GrammarCompiler(tokenizer, V, workers=1, max_waiting=2, clock=lambda: now[0])
    held = Held(compiler, monkeypatch)
    gates = [held.hold(name) for name in "abc"]
    for name in "abc":
        compiler.begin(form(REGEX, name), NONE)
        if name == "a":
            assert held.entered.acquire(timeout=WAIT)
    for name, gate in zip("de", gates, strict=False):  # every 2 s one is done: b, c begin
        now[0] += 2
        gate.set()
        assert held.entered.acquire(timeout=WAIT)
        compiler.begin(form(REGEX, name), NONE)
    advice = []
    for name in "fg":
        with pytest.raises(CompileQueueFullError) as full:
            compiler.begin(form(REGEX, name), NONE).result(0)
        advice.append(full.value.retry_after_s)
    gates[2].set()
    assert 2.2 <= advice[0] <= 2.4  # one must leave, and a margin
    assert 4.4 <= advice[1] <= 4.8  # behind the first


def test_a_thread_that_cannot_be_started_loses_no_worker(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, workers=2)
    compiler.warm_up()
    start, refused = threading.Thread.start, ["headrace-grammar"]

    def refuse(self: threading.Thread) -> None:
        if self.name in refused or (isinstance(self, threading.Timer) and "timer" in refused):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):  # more than there are workers
        with pytest.raises(EngineUnavailableError, match="try again"):
            compiler.begin(form(REGEX, "a"), NONE).result(WAIT)
    refused[:] = ["timer"]
    with pytest.raises(EngineUnavailableError, match="try again"):
        compiler.begin(form(REGEX, "b"), NONE).result(WAIT)
    refused.clear()
    assert callable(compiler.begin(form(REGEX, "a"), NONE).result(WAIT))
    assert callable(compiler.begin(form(REGEX, "b"), NONE).result(WAIT))
    # One worker that is busy takes what comes while the other cannot be started.
    held = Held(compiler, monkeypatch)
    gate = held.hold("slow")
    slow = compiler.begin(form(REGEX, "slow"), NONE)
    assert held.entered.acquire(timeout=WAIT)
    refused[:] = ["headrace-grammar"]
    behind = compiler.begin(form(REGEX, "behind"), NONE)
    gate.set()
    assert callable(slow.result(WAIT))
    assert callable(behind.result(WAIT))


def test_those_who_ask_for_the_same_wait_together_and_may_leave(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, workers=1)
    held = Held(compiler, monkeypatch)
    gate = held.hold("ab")
    first = compiler.begin(form(REGEX, "ab"), NONE)
    second = compiler.begin(form(REGEX, "ab"), NONE)
    left = compiler.begin(form(REGEX, "left"), NONE)
    assert held.entered.acquire(timeout=WAIT)
    assert first.cancel()
    assert left.cancel()
    gate.set()
    assert callable(second.result(WAIT))
    compiler.compile(form(REGEX, "last"), NONE)
    assert held.begun == ["ab", "last"]


def test_a_failure_inside_tells_nothing_and_holds_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, workers=1)

    def fail(params: GrammarParams) -> LLMatcher:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", fail)
        with pytest.raises(InvalidRequestError, match="cannot be compiled") as caught:
            compiler.compile(form(REGEX, "a"), NONE)
    assert "secret" not in str(caught.value)
    assert callable(compiler.compile(form(REGEX, "a"), NONE))


def test_without_a_tokenizer_forms_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"tokenizer\.json"):
        GrammarCompiler(None, V).compile(form(REGEX, "a"), NONE)


def test_a_tokenizer_whose_text_is_no_concatenation_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedFeatureError, match="byte-level"):
        GrammarCompiler(Tokenizer(backend), 3).compile(form(REGEX, "a"), NONE)


def test_a_tokenizer_with_byte_fallback() -> None:
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁"]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    size = 288  # a multiple of 32: the token behind the vocabulary has a word of its own
    matcher = GrammarCompiler(Tokenizer(backend, vocab_size=size), size).compile(
        form(REGEX, " ab"), NONE
    )()
    assert allowed(matcher, size) == {2 + 0x20, names.index("▁a"), names.index("▁")}


def test_the_result_is_there_at_once_for_what_is_known(compiler: GrammarCompiler) -> None:
    compiler.compile(form(REGEX, "known"), NONE)
    known: Future[object] = compiler.begin(form(REGEX, "known"), NONE)  # type: ignore[assignment]
    try:
        assert callable(known.result(0))
    except FutureTimeout:
        pytest.fail("a known form was not there at once")


EXHAUSTING = r"((.{1,200} ){1,200}[A-Z]){1,50}"
"""Its lexer reaches its limit within some tokens."""
HIDDEN = form(REGEX, f"open sesame{EXHAUSTING}|[a-z]{{0,4000}}[.!]")
"""The same behind words that no trial writes, and another branch that costs nothing."""


FEW_STATES = {"max_lexer_states": 120}
"""Enough for each of a few outputs of a form, not for all of them together."""


def exhaust(matcher: TokenMatcher) -> None:
    """Follow a text that takes ever more states, until it cannot be followed."""
    draw = random.Random(1)
    for _ in range(1000):
        tokens = sorted(allowed(matcher, V))
        if matcher.failure is not None:
            return
        matcher.accept(TokenId(draw.choice(tokens)))
    pytest.fail("it can be followed")


def write(matcher: TokenMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept(TokenId(token)), matcher.failure


def test_a_form_that_becomes_too_complex_says_where_and_ends_nobody_else(
    tokenizer: Tokenizer,
) -> None:
    """Matchers of a grammar share its lexer, which never recovers: others get a new one."""
    compiler = GrammarCompiler(tokenizer, V)
    make_matcher = compiler.compile(HIDDEN, NONE)
    matcher, beside, untouched = make_matcher(), make_matcher(), make_matcher()
    alone = GrammarCompiler(tokenizer, V).compile(HIDDEN, NONE)()
    for one in (beside, alone):
        write(one, tokenizer, "some words".replace(" ", ""))
    write(matcher, tokenizer, "open sesame")
    exhaust(matcher)
    assert matcher.failure is not None
    assert re.search(r"too complex to be followed after \d+ tokens, behind \"", matcher.failure)
    assert "less ambiguous" in matcher.failure
    assert not matcher.accept(TokenId(5))
    # Those in flight go on as if they were alone, and so does what was begun but not asked yet.
    write(beside, tokenizer, "and")
    write(alone, tokenizer, "and")
    assert allowed(beside, V) == allowed(alone, V)
    write(beside, tokenizer, "more.")
    assert beside.is_complete
    for later in (untouched, make_matcher(), compiler.compile(HIDDEN, NONE)()):
        assert allowed(later, V)
        write(later, tokenizer, "fine!")
        assert later.is_complete


def test_a_form_is_compiled_anew_only_when_its_lexer_was_lost(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V)
    held = Held(compiler, monkeypatch)
    matcher = compiler.compile(HIDDEN, NONE)()
    write(matcher, tokenizer, "words!")
    write(compiler.compile(HIDDEN, NONE)(), tokenizer, "open sesame")
    assert held.begun == [HIDDEN.text]
    last = compiler.compile(HIDDEN, NONE)()
    write(last, tokenizer, "open sesame")
    exhaust(last)
    compiler.compile(HIDDEN, NONE)
    assert held.begun == [HIDDEN.text] * 2


def test_for_whom_no_time_is_left_the_error_says_to_try_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "CATCH_UP_S", -1.0)
    make_matcher = GrammarCompiler(tokenizer, V).compile(HIDDEN, NONE)
    matcher, beside = make_matcher(), make_matcher()
    write(beside, tokenizer, "words")
    write(matcher, tokenizer, "open sesame")
    exhaust(matcher)
    assert allowed(beside, V) == set()
    assert beside.failure is not None
    assert "another output of the same form" in beside.failure
    assert "send it again" in beside.failure
    assert allowed(make_matcher(), V) == allowed(make_matcher(), V) != set()


def test_a_lexer_that_is_full_is_made_anew_for_all(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are those of all outputs together, so that none of them is at fault."""
    names = [f"{left}_{right}" for left in "abcdefgh" for right in ("name", "number", "note")]
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in names}}
    real = LLParserLimits
    monkeypatch.setattr(compilation, "LLParserLimits", lambda **k: real(**k | FEW_STATES))
    monkeypatch.setattr(compilation, "try_out", lambda *_: Trial(None, 0.0))
    compiler = GrammarCompiler(tokenizer, V)
    params = form(SCHEMA, json.dumps(schema))
    make_matcher = compiler.compile(params, NONE)
    compiled = next(iter(compiler._cache.values()))
    assert isinstance(compiled, CompiledRoot)
    beside = make_matcher()
    write(beside, tokenizer, '{"a_name": ')
    for letter in "abcdefgh":
        matcher = make_matcher()
        text = json.dumps({name: 7 for name in names if name.startswith(letter)})
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert token in allowed(matcher, V), matcher.failure
            assert matcher.accept(TokenId(token)), matcher.failure
        assert matcher.is_complete
    assert compiled.root.is_lost
    write(beside, tokenizer, '7, "h_note": 7}')
    assert beside.is_complete


def test_what_a_matcher_spends_is_counted(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ticks = itertools.count()
    grammar = compiler._cache  # the compiled form is there after this
    compiler.compile(form(REGEX, "[ab]+"), NONE)
    compiled = next(reversed(grammar.values()))
    assert isinstance(compiled, CompiledRoot)
    own = CompiledGrammar(REGEX, compiled.root, V, NONE)
    matcher = GrammarMatcher(own, clock=lambda: next(ticks))
    assert matcher.spent_s == 0
    allowed(matcher, V)
    assert matcher.spent_s == 1  # one mask
    allowed(matcher, V)
    assert matcher.spent_s == 1  # the same one
    token = min(allowed(matcher, V))
    assert matcher.accept(TokenId(token))
    assert matcher.spent_s == 3  # the token, and the mask behind it, since it may end here


CROWD, OTHER = CallerKey("crowd"), CallerKey("other")


def test_a_caller_that_fills_the_queue_makes_room(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, workers=1, max_waiting=3)
    held = Held(compiler, monkeypatch)
    gate = held.hold("c1")
    crowd = [compiler.begin(form(REGEX, "c1"), NONE, caller=CROWD)]
    assert held.entered.acquire(timeout=WAIT)
    crowd += [compiler.begin(form(REGEX, f"c{i}"), NONE, caller=CROWD) for i in range(2, 5)]
    with pytest.raises(CompileQueueFullError, match="too many"):
        compiler.begin(form(REGEX, "c5"), NONE, caller=CROWD).result(0)
    one = compiler.begin(form(REGEX, "o1"), NONE, caller=OTHER)
    with pytest.raises(CompileQueueFullError, match="too many"):
        crowd[3].result(0)  # the last of the crowd
    with pytest.raises(CompileQueueFullError, match="too many"):
        compiler.begin(form(REGEX, "o2"), NONE, caller=OTHER).result(0)  # it has its share
    gate.set()
    for future in [one, *crowd[:3]]:
        assert callable(future.result(WAIT))
    assert held.begun == ["c1", "o1", "c2", "c3"]  # who has nothing in work comes first


def test_neither_salts_nor_names_of_a_group_are_more_places(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V, workers=1, max_waiting=4)
    held = Held(compiler, monkeypatch)
    gate = held.hold("first")
    first = compiler.begin(form(REGEX, "first"), NONE)
    assert held.entered.acquire(timeout=WAIT)

    def begin(text: str, salt: bytes, name: str, group: str) -> Future[Any]:
        return compiler.begin(form(REGEX, text), NONE, salt, CallerKey(name), CallerKey(group))

    # One caller under many salts, and one of a gateway's beside.
    begun = [begin(f"s{i}", bytes([i]), "salty", "") for i in range(3)]
    begun.append(begin("x1", b"", "gateway/x", "gateway"))
    # A second of the gateway's: from him who has most.
    begun.append(begin("y1", b"", "gateway/y", "gateway"))
    with pytest.raises(CompileQueueFullError, match="too many"):
        begun.pop(2).result(0)
    # The gateway has as many as the other by now, whomever it names.
    with pytest.raises(CompileQueueFullError, match="too many"):
        begin("z1", b"", "gateway/z", "gateway").result(0)
    gate.set()
    for future in (first, *begun):
        assert callable(future.result(WAIT))
    assert held.begun == ["first", "s0", "x1", "s1", "y1"]


def test_callers_do_not_share_compiled_forms(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V)
    held = Held(compiler, monkeypatch)
    for caller in (b"a", b"b", b"a", b"b"):
        assert callable(compiler.begin(form(REGEX, "ab"), NONE, caller).result(WAIT))
    assert held.begun == ["ab", "ab"]


def test_a_warm_compiler_has_read_the_vocabulary(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, V)
    compiler.warm_up()
    with monkeypatch.context() as patch:
        patch.setattr("engine.structured.compiler.read_vocabulary", None)
        assert callable(compiler.compile(form(REGEX, "ab"), NONE))
    GrammarCompiler(None, V).warm_up()  # told with the first form
