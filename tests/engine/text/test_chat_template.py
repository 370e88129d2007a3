"""Chat templates against transformers' rendering, and what they may not do."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.contract.errors import InvalidRequestError
from engine.text import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplates,
    ChatTemplateUnavailableError,
    JsonObject,
    Tokenizer,
    TokenizerError,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "description": "Turn the <wheel> & stop",
            "parameters": {"type": "object", "properties": {"speed": {"type": "number"}}},
        },
    }
]
SIMPLE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FEATURES = """
{%- if tools %}
Tools:
    {%- for tool in tools %}

{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}
    {%- endfor %}
{% endif %}
{% set ns = namespace(n=0, last='') %}
{%- macro head(role) %}<{{ role | upper }}>{% endmacro %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {{- head(message['role']) }}
    {% generation %}
    {%- if message.reasoning_content is defined and message.reasoning_content %}
(think {{ message.reasoning_content }})
    {%- endif %}
{{ message.content | trim }}
    {% endgeneration %}
    {% if message.tool_calls %}{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}
    {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{{ ns.n }} {{ dict(a=1, b='ä') | tojson }} {{ bos_token }} {{ eos_token is defined }} {{ 'x' * 3 }}
{%- if enable_thinking is defined and not enable_thinking %} nothink{% endif %}
{% if add_generation_prompt %}<ASSISTANT>{% endif %}
"""
messages_of = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "skip"]),
            "content": st.text(max_size=20),
        },
        optional={
            "reasoning_content": st.one_of(st.none(), st.text(max_size=5)),
            "thinking": st.text(max_size=5),
            "tool_calls": st.just([{"function": {"name": "turn", "arguments": {"é": 1.5}}}]),
        },
    ),
    min_size=1,
    max_size=4,
)


_THOUGHT = {"role": "assistant", "content": "", "thinking": "hm"}
_ALIASES_REASONING = render_jinja_template(
    [[_THOUGHT]], chat_template="{{ messages[0].reasoning_content }}"
)[0] == ["hm"]
"""Whether this version of transformers gives templates a message's reasoning under both names."""


def reference(source: str, messages: Any, **options: Any) -> str:
    """What transformers renders. Older versions hand a message's `thinking` on under that name
    alone; newer ones, and we, also as `reasoning_content`.
    """
    kept = [{k: v for k, v in m.items() if v is not None} for m in messages]
    if not _ALIASES_REASONING:
        kept = [{"reasoning_content": m["thinking"], **m} if "thinking" in m else m for m in kept]
    rendered, _ = render_jinja_template([kept], chat_template=source, **options)
    return str(rendered[0])


@settings(deadline=None, max_examples=60)
@given(
    messages=messages_of,
    tools=st.sampled_from([None, TOOLS]),
    prompt=st.booleans(),
    arguments=st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]),
)
@pytest.mark.parametrize("source", [SIMPLE, FEATURES])
def test_renders_as_transformers(
    source: str, messages: Any, tools: Any, prompt: bool, arguments: dict[str, object]
) -> None:
    templates = ChatTemplates({"default": source}, {"bos_token": "<s>"})
    ours = templates.render(
        messages, tools=tools, add_generation_prompt=prompt, template_arguments=arguments
    )
    theirs = reference(
        source, messages, tools=tools, add_generation_prompt=prompt, bos_token="<s>", **arguments
    )
    assert ours == theirs


@settings(deadline=None, max_examples=60)
@given(content=st.text(min_size=1, max_size=12).filter(lambda s: "CONTINUE" not in s))
@pytest.mark.parametrize("source", [SIMPLE, FEATURES])
def test_continues_the_final_message_as_transformers(source: str, content: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    ours = ChatTemplates({"default": source}, {}).render(messages, continue_final_message=True)
    assert ours == reference(source, messages, continue_final_message=True)


def test_continues_the_last_text_part() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "</s>{% endfor %}"
    )
    messages = [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        }
    ]
    templates = ChatTemplates({"default": source}, {})
    assert templates.render(messages, continue_final_message=True) == "ab"
    assert messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_the_tokenizer_lays_out_as_transformers(
    tokenizers: dict[str, Tokenizer], directories: dict[str, Path]
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers["byte_level"]
    whole = PreTrainedTokenizerFast.from_pretrained(directories["byte_level"])
    messages = [{"role": "user", "content": "the wheel"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = whole.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.has_chat_template


def test_which_template_is_used(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
    messages = [{"role": "user", "content": "x"}]
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["chat_template"] = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    config_path.write_text(json.dumps(config))
    # The file goes before the configuration.
    assert "<|im_start|>" in Tokenizer.load(tmp_path).apply_chat_template(messages)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[]) == "D"
    assert tokenizer.apply_chat_template(messages, tools=TOOLS) == "T"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file of tools")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "file"
    assert tokenizer.apply_chat_template(messages, tools=TOOLS) == "file of tools"


def render(source: str, **options: Any) -> str:
    messages = options.pop("messages", [{"role": "user", "content": "x"}])
    return ChatTemplates({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


_PARTS = """{%- for m in messages %}<{{ m.role }}>
{%- for part in m.content if part.type == 'image' %}<image>{% endfor %}
{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endfor %}"""
_TEXT_OR_PARTS = """{%- for m in messages %}<{{ m.role }}>
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("source", [_PARTS, _TEXT_OR_PARTS], ids=["parts", "text or parts"])
def test_text_and_parts_give_the_same_prompt_of_a_template_for_images(source: str) -> None:
    """As transformers renders the parts. One that reads parts alone would lose plain text."""
    templates = ChatTemplates({"default": source}, {})
    parts = [{"type": "text", "text": "How high "}, {"type": "text", "text": "is it?"}]
    as_parts = [{"role": "user", "content": parts}]
    [expected], _ = render_jinja_template([as_parts], chat_template=source)
    assert expected == "<user>How high is it?"
    assert templates.render(as_parts) == expected
    assert templates.render([{"role": "user", "content": "How high is it?"}]) == expected
    last = [{"role": "assistant", "content": "It is"}]
    assert templates.render(last, continue_final_message=True) == "<assistant>It is"


def test_a_template_of_an_image_processor(directories: dict[str, Path], tmp_path: Path) -> None:
    """It is read if the tokenizer has none of its own."""
    shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    messages = [{"role": "user", "content": "x"}]
    assert "<|im_start|>" in Tokenizer.load(tmp_path).apply_chat_template(messages)
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path).apply_chat_template(messages) == "P"
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"chat_template\.json cannot be read as JSON"):
        Tokenizer.load(tmp_path)


def test_no_template() -> None:
    templates = ChatTemplates({}, {})
    assert not templates.available
    with pytest.raises(ChatTemplateUnavailableError, match="no chat template"):
        templates.render([{"role": "user", "content": "x"}])


def test_a_template_with_an_error() -> None:
    with pytest.raises(ChatTemplateUnavailableError, match="line 2"):
        render("a\n{% if %}")


def test_raise_exception_is_for_the_caller() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "conversation"
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].secret_name.other }}", "does not have"),
        ("{{ 1 / 0 }}", "fails on this conversation"),
        ("{{ ''.__class__.__mro__ }}", "sandbox|does not have"),
        ("{{ messages.append(1) }}", "sandbox"),
        ("{{ 'x' * 10000000 }}", "sandbox"),
        ("{{ [0] * 10000000 }}", "sandbox"),
        ("{{ 10 ** 10000000 }}", "sandbox"),
        ("{% set n = namespace(_x=1) %}", "sandbox"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "sandbox"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"),
        ("{{ dict.__class__ }}{{ dict.__class__.x }}", "sandbox|does not have"),
        ("{{ namespace.__init__.__globals__ }}", "sandbox|does not have"),
        ("{% for i in range(1000000) %}{% endfor %}", "fails on this conversation"),
        ("{% include 'x' %}", "fails on this conversation"),
    ],
)
def test_failures_tell_nothing_of_the_inside(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    for inside in ("secret_name", "Traceback", "jinja", "__", "division"):
        assert inside not in str(caught.value)


def test_size_and_time_are_bounded() -> None:
    endless = "{% for i in range(90000) %}{{ 'x' * 100 }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        ChatTemplate(endless, max_characters=1000).render({})
    with pytest.raises(ChatTemplateError, match="longer than 0 s"):
        ChatTemplate(endless, max_seconds=0.0).render({})


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "eos_token", "raise_exception", "range", "self"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="set by the server") as caught:
        render("x", template_arguments={name: 1})
    assert caught.value.field == f"template_arguments.{name}"


@pytest.mark.parametrize("name", ["_x", "a-b", "", "1a", "é?"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="letters"):
        render("x", template_arguments={name: 1})


def test_names_need_not_be_ascii() -> None:
    assert render("{{ größe }}", template_arguments={"größe": 1}) == "1"


@pytest.mark.parametrize(
    ("calls", "content", "printed"),
    [
        # As most: content is left out, arguments are a mapping.
        ("{{ c.function.arguments | tojson }}", "{{ m.content }}", '<>{"a": 1}'),
        ("{{ c.function.arguments.a }}", "{{ m.content is defined }}", "<False>1"),
        # Arguments are joined as text, with a special token that must be there.
        ("{{ bos_token + c.function.arguments }}", "{{ m.content }}", '<><s>{"a":  1}'),
        ("{{ c.function.arguments }}", "{{ m.content }}", '<>{"a":  1}'),
        # Content must be a string; or null, else the call is lost; or it fails on what is left out.
        ("{{ c.function.arguments | tojson }}", "{{ '' + m.content }}", '<>{"a": 1}'),
        (
            "{% if m.content is none %}{{ c.function.arguments | tojson }}{% endif %}",
            "{{ m.content }}",
            '<None>{"a": 1}',
        ),
        (
            "{{ c.function.arguments }}",
            "{% if m.content is none %}{% else %}{{ '' + m.content }}{% endif %}",
            '<>{"a":  1}',
        ),
        # It has no calls: as transformers would show it.
        ("", "{{ m.content is defined }}", "<False>"),
        # It has none and needs a content: the first form that renders.
        ("", "{{ m.content + '' }}", "<>"),
    ],
)
def test_tool_calls_are_shown_in_the_form_that_the_template_takes(
    calls: str, content: str, printed: str
) -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}<" + content + ">"
        "{% for c in m.tool_calls %}" + calls + "{% endfor %}{% endif %}{% endfor %}"
    )
    arguments = JsonObject({"a": 1}, '{"a":  1}')
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(source, messages=messages) == printed
    messages[0]["content"] = "said"
    assert "<None>" not in render(source, messages=messages)


def test_the_clock_is_the_tokenizers(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    tokenizer = Tokenizer.load(tmp_path, clock=lambda: datetime(2031, 2, 3))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "03 Feb 2031"


def test_wrong_conversations_are_refused() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for messages, field in [
        ([], "messages"),
        ([1], r"messages\[0\]"),
        ([{"role": "user", "content": object()}], r"messages\[0\]"),
        ([{"role": "user", 1: "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": deep}], r"messages\[0\]"),
    ]:
        with pytest.raises(InvalidRequestError, match=field):
            render(SIMPLE, messages=messages)


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="excludes"):
        render(SIMPLE, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match="content"):
        render(SIMPLE, continue_final_message=True, messages=[{"role": "assistant"}])
    with pytest.raises(InvalidRequestError, match="content"):
        render("{{ messages }}", continue_final_message=True)
    messages = [{"role": "assistant", "content": [{"type": "image"}]}]
    with pytest.raises(InvalidRequestError, match="text"):
        render(SIMPLE, continue_final_message=True, messages=messages)
    with pytest.raises(ChatTemplateError, match="continued"):
        render("{{ messages[0].content[:1] }}", continue_final_message=True)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": "x", "thinking": "hm", "name": None}]
    render(SIMPLE, continue_final_message=True, messages=messages)
    assert messages == [{"role": "assistant", "content": "x", "thinking": "hm", "name": None}]
    assert render("{{ messages[0] | tojson }}", messages=messages) == (
        '{"thinking": "hm", "role": "assistant", "content": "x", "reasoning_content": "hm"}'
    )


def test_the_default_prompt_is_open() -> None:
    assert render(SIMPLE).endswith("[assistant] ")
    assert render(SIMPLE, continue_final_message=True) == "[user] x"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
