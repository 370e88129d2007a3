"""What a model lacks is refused with what its operator may do about it: both where a message
requires the capability by name, and where it sets the field that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from service.convert.lacking import why_lacking
from service.replies import FORMATS, CallGrammar, format_option
from service.replies.format import marked
from service.replies.json_calls import call_object
from tests.service.fake_engine import byte_tokenizer
from tests.service.helpers import refused, serving, spec
from tests.service.replies.templates import HERMES

BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT: dict[str, Any] = {
    "messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}],
    "tools": [{"name": "look"}],
}
FIELDS = {
    "tool_choice": (
        spec(chat={**CHAT, "tool_choice": {"mode": pb.TOOL_CHOICE_MODE_REQUIRED}}),
        "spec.chat.tool_choice",
    ),
    "reasoning_budget": (
        spec(chat=CHAT, stop={"max_reasoning_tokens": 3}),
        "spec.stop.max_reasoning_tokens",
    ),
}
"""What needs a capability, and the path of what asks for it."""
INSTEAD = {
    "typed_replies": "do not require it, and read each reply as text",
    "tool_choice": "leave chat.tool_choice out",
    "reasoning_budget": "leave stop.max_reasoning_tokens out",
    "structured_output": "leave structured_output out",
}


@dataclass(frozen=True)
class Model:
    """A model: its chat template, its special tokens, and the server's --reply-parser."""

    template: str | None
    option: str = "auto"
    special: tuple[str, ...] = ()


UNKNOWN = Model(BARE)
UNPARSED = Model(BARE + "<tool_call>arguments</think>", "none")
NO_CALLS = Model(BARE, "think")
OTHER = marked(
    "other",
    {"<|tool_call|>": lambda reader, out, _: call_object(reader, out)},  # type: ignore[arg-type,return-value]
    forms=(CallGrammar(before="", after="", end="", marks=("<call>",)),),
)
SPOKEN = marked("spoken", {"=>": call_object})  # type: ignore[dict-item]
NOT_HELD = Model(BARE, f"{__name__}:SPOKEN")
SPECIAL = Model(BARE, "qwen3_coder", ("<parameter=",))
OTHER_MARKS = Model(
    HERMES.replace("<tool_call>\n", "<|tool_call|>").replace("\n</tool_call>", ""),
    f"{__name__}:OTHER",
)
NO_MARKS = Model(BARE, "hermes")
MUTE = Model(None)
CASES = [
    *(
        (UNKNOWN, name, "no parser here reads back what the model's chat template writes; its "
         "operator may name the format that the model writes, such as --reply-parser hermes")
        for name in ("typed_replies", "tool_choice", "reasoning_budget")
    ),
    *(
        (UNPARSED, name, "(--reply-parser none); its operator may start it with --reply-parser "
         "auto")
        for name in ("typed_replies", "tool_choice", "reasoning_budget")
    ),
    (NO_CALLS, "tool_choice", "replies are read as think, which has no tool calls (was chosen by "
     "--reply-parser); if the model writes them, its operator may name their format, such as "
     "--reply-parser hermes"),
    (NO_CALLS, "reasoning_budget", "neither the model's chat template nor its vocabulary has the "
     "marks of reasoning (<think> and </think> in the format think)"),
    (NOT_HELD, "tool_choice", "format (spoken) cannot be held to a choice, and no option changes"),
    (SPECIAL, "tool_choice", "vocabulary has <parameter= as special tokens, and in its format "
     "(qwen3_coder) they are held as text alone; no option changes that"),
    (OTHER_MARKS, "tool_choice", "template writes calls with other marks than those in which the "
     "format other can be held"),
    (NO_MARKS, "reasoning_budget", "neither the model's chat template nor its vocabulary has the "
     "marks of reasoning (<think> and </think> in the format hermes), and no option adds them"),
]  # fmt: skip


def name_of(value: object) -> str | None:
    return f"{value.template and value.option}" if isinstance(value, Model) else None


@pytest.mark.parametrize(("model", "capability", "words"), CASES, ids=name_of)
async def test_what_the_model_lacks_is_refused_with_the_remedy(
    model: Model, capability: str, words: str
) -> None:
    tokenizer = byte_tokenizer(chat_template=model.template, special=model.special)
    async with serving(tokenizer=tokenizer, reply_parser=model.option) as h:
        assert capability not in h.server.state.front.card.capabilities.names
        required = rpc.GenerateRequest(spec=spec(chat=CHAT), required_capabilities=[capability])
        error = await refused(h.generation.Generate(required))
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")
        assert f"{capability!r}" in error.message
        assert words in error.message
        assert INSTEAD[capability] in error.message
        assert error.message.endswith(")"), "not cut: what it has comes last"
        if capability in FIELDS:
            asked, field = FIELDS[capability]
            error = await refused(h.generation.Generate(rpc.GenerateRequest(spec=asked)))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
            assert error.field == field
            assert f"{field}: is not supported here: " in error.message
            assert words in error.message
            assert error.message.endswith("; leave it out")


@pytest.mark.parametrize(
    "capability",
    ["chat", "tools", "content_parts", "typed_replies", "tool_choice", "reasoning_budget"],
)
@pytest.mark.parametrize(
    ("has_tokenizer", "words"),
    [(True, "chat_template.jinja"), (False, "has no tokenizer.json, which its operator may add")],
)
async def test_what_needs_a_file_of_the_model_is_refused_by_that_file(
    capability: str, has_tokenizer: bool, words: str
) -> None:
    tokenizer = byte_tokenizer(chat_template=None) if has_tokenizer else None
    async with serving(tokenizer=tokenizer, has_tokenizer=has_tokenizer) as h:
        required = rpc.GenerateRequest(
            spec=spec(tokens={"ids": [1]}), required_capabilities=[capability]
        )
        error = await refused(h.generation.Generate(required))
    assert error.reason == "CAPABILITY_MISSING"
    assert words in error.message


async def test_what_no_server_has_is_refused_with_what_the_caller_may_do() -> None:
    async with serving() as h:
        required = rpc.GenerateRequest(spec=spec(), required_capabilities=["time_travel"])
        error = await refused(h.generation.Generate(required))
    assert "requires: leave out what needs it, or use another server (it has " in error.message


@pytest.mark.parametrize("option", ["auto", "none", *FORMATS])
@pytest.mark.parametrize("template", [None, BARE, BARE + "<tool_call>arguments</think>"])
def test_whatever_is_missing_has_a_reason_and_nothing_else_has(
    option: str, template: str | None
) -> None:
    tokenizer = byte_tokenizer(chat_template=template)
    reply = format_option(option)(tokenizer)
    missing = {
        "typed_replies": template is None or reply is None,
        "tool_choice": template is None or reply is None or reply.call_form is None,
        "reasoning_budget": template is None or reply is None or not reply.reasons,
    }
    why = why_lacking(tokenizer, reply, option)
    assert {name for name in missing if missing[name]} == why.keys() & missing.keys()
    assert all(why.values())
