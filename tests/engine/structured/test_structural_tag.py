"""Structural tags: what is generated is of the format by an independent reading, and what cannot be
held is refused with its place.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequestError
from engine.contract.types import TokenId
from engine.structured import GrammarCompiler
from engine.structured.matcher import GrammarMatcher
from engine.text import Tokenizer
from tests.engine.structured.conftest import V
from tests.engine.structured.following import allowed
from tests.engine.structured.tag_check import is_of
from tests.engine.structured.tags import OBJECT, Form, Taker, params, tag, wander

INTEGER: Form = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY: Form = {"type": "any_text"}


def const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def row(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}


def triggered(triggers: list[str], *tags: Form, **more: object) -> Form:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def separated(separator: str, *tags: Form, **more: object) -> Form:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": separator, **more}


@pytest.fixture(scope="module")
def takes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Taker:
    return Taker(compiler, tokenizer)


CALLS = triggered(
    ["<f="], tag("<f=a>", "</f>"), tag("<f=b>", "</f>", {"type": "regex", "pattern": "[a-z]*"})
)
A = '<f=a>{"a": 1}</f>'
SPECIAL = triggered(["<|user|>"], tag("<|user|>f<|system|>", "<|assistant|>"))
MIXED = triggered(["go<|user|>"], tag("go<|user|>f<|system|>", ["<|assistant|>", "."]))
CASES: list[tuple[Form, list[str], list[str]]] = [
    (const("a<|user|>b"), ["a<|user|>b"], ["a", "ab", "a<|user|>", ""]),
    (OBJECT, ['{"a": 1}'], ['{"a":1}', "{}", '{"a": 1} ']),
    (
        CALLS,
        ["", "hi", A, f"x{A}y<f=b>end</f> z<f", f"{A}{A}", "<f=b></f>", "<<f=b>x</f>"],
        ["<f=", "a<f=c", "<f=b>x</f", "<f=a>", f"{A}<f=", "<f=b>X</f>"],
    ),
    ({**CALLS, "at_least_one": True}, [A, f"t{A}t"], ["", "hi", "<f"]),
    ({**CALLS, "stop_after_first": True}, ["", "hi", f"t{A}"], [f"{A}t", f"{A}{A}", "<f="]),
    ({**CALLS, "stop_after_first": True, "at_least_one": True}, [f"t{A}"], ["", f"{A}t"]),
    ({**CALLS, "excludes": ["x", "yz"]}, [f"y{A}z", "yyy"], ["x", f"{A}ayz"]),
    (
        SPECIAL,
        ["", 't<|user|>f<|system|>{"a": 1}<|assistant|>t'],
        ["<|user|>", "<|system|>", "<|user|>g", '<|user|>f<|system|>{"a": 1}'],
    ),
    (
        MIXED,
        ["go", 'gogo<|user|>f<|system|>{"a": 1}.go', 'go<|user|>f<|system|>{"a": 1}<|assistant|>'],
        ["g<|user|>", "go x<|user|>", "go<|user|>"],
    ),
    (
        row(const("<think>"), ANY, const("</think>\n"), OBJECT),
        ['<think></think>\n{"a": 1}', '<think></think></think>\n{"a": -2}'],
        ['<think>{"a": 1}', "<think></think>\n"],
    ),
    (row(ANY, const("é")), ["é", "xé"], ["", "x", "éx"]),
    (tag("<", [">", ">>", "."], ANY), ["<>", "<a.", "<>>"], ["<a", "<.>"]),
    (tag("<", ["<|user|>", "!"], ANY), ["<<|user|>", "<a!"], ["<", "<a!<|user|>"]),
    (tag("<", "", ANY), ["<", "<abc"], [""]),
    (tag("<", "</n>", {"type": "regex", "pattern": "[a-z]+"}), ["<n</n>"], ["<</n>", "<n<"]),
    (
        separated(", ", tag("<a>", "</a>"), tag("<b>", "</b>", ANY)),
        ["", '<a>{"a": 1}</a>', '<b></b>, <a>{"a": 1}</a>'],
        ["<b></b>, ", "<b></b><b></b>", ", "],
    ),
    (
        separated("<|user|>", tag("<b>", "</b>", ANY), at_least_one=True),
        ["<b></b>", "<b>x</b><|user|><b></b>"],
        ["", "<b></b><|user|>"],
    ),
    (separated(",", tag("<", ">", ANY), stop_after_first=True), ["", "<>"], ["<>,<>"]),
    (
        row(one_of({**ANY, "excludes": ["x"]}, const("<no>")), const("END")),
        ["END", "<no>END", "aEND"],
        ["xEND", "aENDb", "<no>"],
    ),
    (row(CALLS, const("END")), [f"a{A}bEND", "END"], [f"END{A}", "a", f"{A}"]),
    (row(separated(";", tag("<", ">", ANY)), const("!")), ["!", "<a>!", "<>;<>!"], ["<a>", ";!"]),
    (row(ANY, separated(";", tag("<", ">", ANY)), const("!")), ["a!", "a<b>;<>!"], ["a", "a<b>"]),
    (
        row(const("<"), {"type": "grammar", "grammar": 'start: N "=" N\nN: /[a-z]+/'}, const(">")),
        ["<a=bc>"],
        ["<a=>", "a=b"],
    ),
    ({"type": "json_schema", "json_schema": True}, ["1", "{}", '"a"'], ["", "a"]),
    (
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<"],
        },
        ["", "a<f>12</f>b"],
        ["a<b", "<f>x"],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
@pytest.mark.parametrize("flexible", [False, True])
def test_formats(takes: Taker, form: Form, good: list[str], bad: list[str], flexible: bool) -> None:
    for text in good:
        assert takes(form, text, flexible=flexible), text
    for text in bad:
        if not flexible or '"a"' not in text:
            assert not takes(form, text, flexible=flexible), text


def test_flexible_white_space(takes: Taker) -> None:
    text = 'x<f=a>{\n "a" : 1\n}</f>y'
    assert takes(CALLS, text, flexible=True)
    assert not takes(CALLS, text)


SCHEMA_300 = {"properties": {f"p{i}": {} for i in range(300)}}
QWEN: Form = {"type": "qwen_xml_parameter"}
REFUSED: list[tuple[Form | str, str]] = [
    ("{", "is not valid JSON"),
    ("[" * 100_000, "is nested deeper"),
    ("[]", "is not a JSON object"),
    ('{"type": "x"}', "type is x; it must be structural_tag"),
    ('{"type": "structural_tag"}', "format is missing; it must be an object"),
    ('{"type": "structural_tag", "format": {"type": 1e400}}', 'format.type is "1e400"'),
    (row(const("x"), {"type": "foo"}), "format.elements[1].type is foo; it must be one of struct"),
    (row(const("x"), {"type": ["foo"]}), 'format.elements[1].type is ["foo"]'),
    ({**const("x"), "valeu": 1}, "format.valeu is not known; known here: value"),
    ({"type": "const_string"}, "format.value is missing; it must be a string"),
    (row(), "format.elements is []; it must be a list, not empty"),
    ({**CALLS, "at_least_one": 1}, "format.at_least_one is 1; it must be true or false"),
    (triggered(["<"], tag(">", "")), "format.tags[0].begin begins with none of the triggers"),
    (triggered(["<", "["], tag("<a", "b")), "format.triggers[1] is the beginning of no tag"),
    (triggered(["<", ""], tag("<a", "b")), "format.triggers[1] is ; it must be a string, not"),
    (triggered(["<"], tag("<", "", ANY)), "format.tags[0].end is empty"),
    (
        triggered(["<a", "b<a>"], tag("<a", "c"), tag("b<a>", "d")),
        'has "b<a>", which may end the free text in format, but contains "<a"',
    ),
    (row(ANY, OBJECT), "has free text in format.elements[0] and no fixed text behind it"),
    (row(CALLS, OBJECT), "has free text in format.elements[0] and no fixed text behind it"),
    (
        row(const("x"), {"type": "json_schema", "json_schema": {"const": 12345678901234567890}}),
        "format.elements[1].json_schema has 12345678901234567890 in $.const",
    ),
    ({"type": "json_schema", "json_schema": []}, "format.json_schema is neither a JSON object"),
    ({"type": "json_schema", "json_schema": SCHEMA_300}, "format.json_schema has 300 optional"),
    ({"type": "json_schema", "json_schema": {"x-guidance": {}}}, "format.json_schema has the key"),
    ({"type": "grammar", "grammar": "start: %json {}"}, "format.grammar has %json"),
    ({"type": "regex", "pattern": "a" * 17_000}, "format.pattern is too long"),
    (row(const("x"), {"type": "regex", "pattern": "(?=a)b"}), "format.elements[1] has look-around"),
    (
        triggered(
            ["<"],
            tag("<a", ">", {"type": "json_schema", "json_schema": {"type": "integer"}}),
            tag("<b", ">", {"type": "json_schema", "json_schema": {"if": {}}}),
        ),
        "format.tags[1].content.json_schema uses keywords that are not supported",
    ),
    (
        row(const("x"), {"type": "grammar", "grammar": 'begin: "x"'}),
        "format.elements[1].grammar has no rule called start",
    ),
    (
        tag("<", ">", {**QWEN, "json_schema": {"properties": {"p": {"type": "array", "if": {}}}}}),
        "format.content.json_schema.properties.p uses keywords that are not supported",
    ),
    (row(*[{"type": "regex", "pattern": "a" * 9_000}] * 2), "format.elements[1].pattern is too"),
    (row(*[{"type": "grammar", "grammar": "start: A\n" * 4_000}] * 2), "[1].grammar is too long"),
    (row(*[const("x")] * 600), "has more than 512 formats"),
    ({**ANY, "excludes": ["x"] * 600}, "has more than 512 formats"),
    (
        one_of(
            *[
                {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": m}}
                for m in (997, 991)
            ]
        ),
        "has multipleOf values that are too large or too many",
    ),
]


@pytest.mark.parametrize(("form", "message"), REFUSED)
def test_what_cannot_be_held_is_refused_with_its_place(
    compiler: GrammarCompiler, form: Form | str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(params(form), frozenset())
    assert caught.value.field == "grammar.structural_tag"
    assert message in caught.value.description
    assert len(caught.value.description) < 450


def test_nesting_is_bounded(compiler: GrammarCompiler) -> None:
    deepest: Form = const("x")
    for _ in range(31):
        deepest = row(deepest)
    compiler.compile(params(deepest), frozenset())
    with pytest.raises(InvalidRequestError, match="nested deeper than 32 formats"):
        compiler.compile(params(row(deepest)), frozenset())


def test_choices_in_a_row_do_not_multiply(compiler: GrammarCompiler) -> None:
    form = row(*[tag("<", [">", ">>"], one_of(ANY, const("x"), INTEGER)) for _ in range(60)])
    matcher = compiler.compile(params(form), frozenset())()
    assert isinstance(matcher, GrammarMatcher)
    assert matcher.can_go_on()


def test_a_form_may_end_with_an_ending_id_that_it_names(takes: Taker) -> None:
    eos = TokenId(takes.bytewise("<|eos|>")[0])
    for form in (
        tag("<a>", "<|eos|>"),
        tag("<a>", ["</a>", "<|eos|>"]),
        triggered(["<a>"], tag("<a>", "<|eos|>"), at_least_one=True),
        row(tag("<a>", "<|eos|>"), one_of(ANY, const("x"))),
    ):
        matcher = takes.compiler.compile(params(form), frozenset({eos}))()
        for token in takes.bytewise('<a>{"a": 1'):
            assert eos not in allowed(matcher, V)
            assert matcher.accept(TokenId(token))
        assert eos not in allowed(matcher, V)
        assert matcher.accept(TokenId(takes.bytewise("}")[0]))
        assert eos in allowed(matcher, V)
    not_last = row(tag("<a>", "<|eos|>"), const("x"))
    matcher = takes.compiler.compile(params(not_last), frozenset({eos}))()
    for token in takes.bytewise('<a>{"a": 1}'):
        assert matcher.accept(TokenId(token))
    assert not allowed(matcher, V)


def test_a_long_sequence_of_free_texts(takes: Taker) -> None:
    form = row(*[part for i in range(250) for part in (ANY, const(f"<{i}>"))])
    text = "".join(f"x<{i}>" for i in range(250))
    assert takes(form, text)
    assert not takes(form, text + "x")


def test_the_message_about_a_long_place_is_short(compiler: GrammarCompiler) -> None:
    form: Form = {"type": "foo"}
    for _ in range(30):
        form = row(form)
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(params(form), frozenset())
    assert len(caught.value.description) < 450
    assert "it must be one of" in caught.value.description


# ---- random formats, random outputs --------------------------------------------------------------

WORDS = ["a", "ab", "b>", "<t>", "</t>", "<t=", "é", "<|user|>", "x<|system|>", "<|assistant|>!"]
words = st.sampled_from(WORDS)
leaves = st.one_of(
    words.map(const),
    st.just(OBJECT),
    st.just(INTEGER),
    st.just(ANY),
    st.sampled_from(["[ab]{1,3}", "(ab)*c", "<[^>]*"]).map(
        lambda pattern: {"type": "regex", "pattern": pattern}
    ),
    st.lists(words, min_size=1, max_size=2).map(lambda e: {"type": "any_text", "excludes": e}),
)


def _compound(inner: st.SearchStrategy[Form]) -> st.SearchStrategy[Form]:
    tags = st.builds(tag, words, st.one_of(words, st.lists(words, min_size=1, max_size=2)), inner)
    flags = st.fixed_dictionaries(
        {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    )
    several = st.lists(tags, min_size=1, max_size=3)
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda e: row(*e)),
        st.lists(inner, min_size=1, max_size=3).map(lambda e: one_of(*e)),
        tags,
        st.builds(
            lambda tags, more: triggered(sorted({t["begin"] for t in tags}), *tags, **more),
            several,
            flags,
        ),
        st.builds(lambda s, tags, more: separated(s, *tags, **more), words, several, flags),
    )


forms = st.recursive(leaves, _compound, max_leaves=6)


KNOWN = ("no fixed text behind it", "ends it earlier", "is empty, so", "the empty text")
"""Why random formats may be refused."""


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(form=forms, seed=st.integers(0, 1 << 30))
def test_outputs_of_random_formats_are_of_the_format(takes: Taker, form: Form, seed: int) -> None:
    end = frozenset([TokenId(V - 1)])
    try:
        make = takes.compiler.compile(params(form), end)
    except InvalidRequestError as error:
        if any(words in error.description for words in KNOWN):
            return
        raise
    hints = [takes.bytewise(word) for word in [*WORDS, '{"a": 1}', "12"]]
    for walk in range(3):
        matcher = make()
        assert isinstance(matcher, GrammarMatcher)
        text = wander(matcher, takes.tokenizer, seed + walk, hints)
        if text is not None:
            assert is_of(form, text), text


def test_an_error_within_a_tag_shows_how_the_tag_begins(takes: Taker) -> None:
    inner = tag("<look>", "</look>", {"type": "json_schema", "json_schema": 3})
    with pytest.raises(InvalidRequestError) as caught:
        takes.compiler.compile(params(tag("[", "]", inner)), frozenset())
    assert caught.value.description.startswith("format.content.content.json_schema ")
    assert caught.value.description.endswith('(in the tag that begins with "<look>")')


def test_a_whole_structural_tag_may_be_a_part_of_another(takes: Taker) -> None:
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    newer = {"type": "structural_tag", "format": const("end")}
    form = row(const("begin "), newer, const(" "), older)
    assert takes(form, "begin end <f>null</f>")
    assert not takes(form, "begin <f>null</f>")
    broken = {"type": "structural_tag", "structures": older["structures"]}
    with pytest.raises(InvalidRequestError, match=r"format.elements\[0\].triggers is missing"):
        takes.compiler.compile(params(row(broken)), frozenset())
