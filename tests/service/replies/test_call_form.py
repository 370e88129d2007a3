"""How formats write calls: what a form allows is what the format's own parser reads as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.replies import FORMATS, CallGrammar, Context, Reply, ToolMode, ToolSchema, fold

TOOLS = [ToolSchema("look", {"type": "object"}), ToolSchema("schauen_水", {"type": "object"})]
TYPES: dict[str, dict[str, frozenset[str]]] = {tool.name: {} for tool in TOOLS}


def forms() -> list[Any]:
    return [
        pytest.param(name, form, id=f"{name}-{index}")
        for name, format in FORMATS.items()
        for index, form in enumerate(format.forms)
    ]


def read(name: str, text: str, *, calls: bool = True) -> Reply:
    parser = FORMATS[name].begin(Context(TYPES, calls=calls))
    return fold([*parser.push(text), *parser.finish()])


def written(node: dict[str, Any], words: str = "") -> list[str]:
    """Some of the replies that a structural tag allows: each tag once, and several of them where
    it may have several; {} as arguments, and these words as free text.
    """
    match node["type"]:
        case "const_string":
            return [node["value"]]
        case "any_text" | "grammar":
            return [words]
        case "json_schema":
            return ["{}"]
        case "tagged_parameters" | "python_arguments" | "bare_object":
            return [""]
        case "tag":
            return [f"{node['begin']}{text}{node['end']}" for text in written(node["content"])]
        case "tags_with_separator":
            tags = [text for tag in node["tags"] for text in written(tag)]
            assert node["at_least_one"]
            return tags if node["stop_after_first"] else [*tags, node["separator"].join(tags)]
        case "triggered_tags":
            tags = [text for tag in node["tags"] for text in written(tag)]
            assert all(text.startswith(node["triggers"][0]) for text in tags)
            return [words, *(words + text for text in tags)]
        case "sequence":
            texts = [""]
            for element in node["elements"]:
                texts = [text + more for text in texts for more in written(element, words)]
            return texts
        case "or":
            return [text for element in node["elements"] for text in written(element, words)]
        case kind:
            raise AssertionError(kind)


def replies(form: CallGrammar, mode: ToolMode, parallel: bool = True, words: str = "") -> list[str]:
    tag = json.loads(form.structural_tag(mode, TOOLS, parallel=parallel))
    assert tag["type"] == "structural_tag"
    return written(tag["format"], words)


def test_plain_reasoning_has_no_form() -> None:
    assert FORMATS["think"].form is None
    assert {"hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek", "harmony"} <= {
        param.values[0] for param in forms()
    }


@pytest.mark.parametrize(("name", "form"), forms())
def test_what_is_required_is_read_as_calls(name: str, form: CallGrammar) -> None:
    one = [["look"], ["schauen_水"]]
    both = [["look", "schauen_水"]] if form.separator is not None else []
    for parallel in (False, True):
        found = [read(name, text) for text in replies(form, ToolMode.REQUIRED, parallel)]
        names = [[call.name for call in reply.calls] for reply in found]
        assert names == one + (both if parallel else [])
        assert all(call.complete for reply in found for call in reply.calls)
        assert all(call.arguments == "{}" for reply in found for call in reply.calls)
        assert all((reply.text, reply.reasoning) == ("", "") for reply in found)


@pytest.mark.parametrize(("name", "form"), forms())
def test_words_are_text_and_calls_come_with_them(name: str, form: CallGrammar) -> None:
    found = [read(name, text) for text in replies(form, ToolMode.AUTO, words="I look.")]
    assert any((reply.text, reply.calls) == ("I look.", ()) for reply in found)
    called = [[call.name for call in reply.calls] for reply in found if reply.calls]
    assert ["look"] in called
    assert ["schauen_水"] in called
    assert all(call.complete for reply in found for call in reply.calls)
    for text in replies(form, ToolMode.NONE, words="I look."):
        assert (read(name, text).text, read(name, text).calls) == ("I look.", ())


@pytest.mark.parametrize(("name", "form"), forms())
def test_a_call_without_arguments_is_written_for_the_parser(name: str, form: CallGrammar) -> None:
    [call] = read(name, form.written("look")).calls
    assert (call.name, call.arguments, call.complete) == ("look", "{}", True)
    if not form.name_in_json:
        odd = "look\n"
        assert [call.name for call in read(name, form.written(odd)).calls] != [odd]


@pytest.mark.parametrize(("name", "form"), forms())
def test_where_there_are_no_calls_what_looks_like_one_is_text(name: str, form: CallGrammar) -> None:
    reply = read(name, form.written("look"), calls=False)
    assert reply.calls == ()
    assert reply.raw == form.written("look")
    if name != "harmony":  # its header is no text, its message is
        assert reply.text == reply.raw
