"""Every member of a body does what the one table says of it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from headrace.openai import asked
from headrace.openai.asked import Asked
from headrace.openai.errors import ApiError
from headrace.openai.fields import FIELDS, ROUTES, Route
from headrace.openai.replies import usage_of
from headrace.results import Result, Usage
from headrace.v1 import generation_pb2 as pb

from tests.openai import field_table

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[Route, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL]}
DEFINED = [{"definition_json": json.dumps(TOOL)}]
REQUIRED = {"mode": "TOOL_CHOICE_MODE_REQUIRED"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"a": 1}}}

SPECS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "model": [({"model": "m"}, {})],
    "temperature": [
        ({"temperature": 0.5}, {"sampling": {"temperature": 0.5}}),
        ({"temperature": 0}, {"sampling": {"temperature": 0}}),
    ],
    "top_p": [({"top_p": 0.5}, {"sampling": {"top_p": 0.5}})],
    "n": [({"n": 3}, {"n": 3})],
    "seed": [
        ({"seed": 7}, {"sampling": {"seed": 7}}),
        ({"seed": -1}, {"sampling": {"seed": 2**63 - 1}}),
        ({"seed": 2**63 + 5}, {"sampling": {"seed": 5}}),
    ],
    "stop": [
        ({"stop": "a"}, {"stop": {"stop_strings": ["a"]}}),
        ({"stop": ["a", "b"]}, {"stop": {"stop_strings": ["a", "b"]}}),
    ],
    "max_tokens": [({"max_tokens": 9}, {"stop": {"max_tokens": 9}})],
    "presence_penalty": [({"presence_penalty": 1.5}, {"sampling": {"presence_penalty": 1.5}})],
    "frequency_penalty": [({"frequency_penalty": -1}, {"sampling": {"frequency_penalty": -1}})],
    "logit_bias": [({"logit_bias": {"5": -100}}, {"sampling": {"logit_bias": {5: -100}}})],
    "stream": [({"stream": True}, {})],
    "stream_options": [({"stream": True, "stream_options": {"include_usage": True}}, {})],
    "response_format": [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"structured_output": {"json_object": {}}}),
        ({"response_format": FORM}, {"structured_output": {"json_schema": '{"a": 1}'}}),
    ],
    "top_k": [
        ({"top_k": 4}, {"sampling": {"top_k": 4}}),
        ({"top_k": -1}, {"sampling": {"top_k": 0}}),
    ],
    "min_p": [({"min_p": 0.5}, {"sampling": {"min_p": 0.5}})],
    "typical_p": [({"typical_p": 0.5}, {"sampling": {"typical_p": 0.5}})],
    "repetition_penalty": [({"repetition_penalty": 2}, {"sampling": {"repetition_penalty": 2}})],
    "no_repeat_ngram_size": [
        ({"no_repeat_ngram_size": 3}, {"sampling": {"no_repeat_ngram_size": 3}})
    ],
    "ignore_eos": [({"ignore_eos": True}, {"stop": {"ignore_eos": True}})],
    "min_tokens": [({"min_tokens": 2}, {"stop": {"min_tokens": 2}})],
    "stop_token_ids": [({"stop_token_ids": [4, 5]}, {"stop": {"stop_token_ids": [4, 5]}})],
    "include_stop_str_in_output": [
        ({"include_stop_str_in_output": True}, {"stop": {"include_stop": True}})
    ],
    "skip_special_tokens": [
        ({"skip_special_tokens": False}, {"output": {"skip_special_tokens": False}})
    ],
    "allowed_token_ids": [
        ({"allowed_token_ids": [4]}, {"sampling": {"allowed_token_ids": [4]}})
    ],
    "logprob_token_ids": [({"logprob_token_ids": [4]}, {"output": {"logprob_token_ids": [4]}})],
    "prompt_logprobs": [({"prompt_logprobs": 2}, {"output": {"prompt_logprobs": 2}})],
    "truncate_prompt_tokens": [
        ({"truncate_prompt_tokens": 8}, {"truncation": {"max_prompt_tokens": 8}})
    ],
    "structured_outputs": [
        (
            {"structured_outputs": {"json": {"a": 1}}},
            {"structured_output": {"json_schema": '{"a": 1}'}},
        ),
        ({"structured_outputs": {"json": "{}"}}, {"structured_output": {"json_schema": "{}"}}),
        ({"structured_outputs": {"json_object": True}}, {"structured_output": {"json_object": {}}}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_output": {"regex": "a+"}}),
        (
            {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
            {"structured_output": {"choice": {"choices": ["a", "b"]}}},
        ),
        (
            {"structured_outputs": {"grammar": "start: A"}},
            {"structured_output": {"grammar": "start: A"}},
        ),
        (
            {"structured_outputs": {"structural_tag": {"a": 1}}},
            {"structured_output": {"structural_tag": '{"a": 1}'}},
        ),
    ],
    "priority": [({"priority": -5}, {"scheduling": {"priority": 5}})],
    "cache_salt": [({"cache_salt": "x"}, {"cache": {"salt": "x"}})],
    "return_token_ids": [({"return_token_ids": True}, {})],
}  # fmt: skip
"""Members of both routes: a body's, and the request that it makes."""
TEXT_PART = {"type": "text", "text": "yes"}
CHAT_SPECS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "messages": [({}, {})],
    "max_completion_tokens": [({"max_completion_tokens": 9}, {"stop": {"max_tokens": 9}})],
    "prediction": [
        (
            {"prediction": {"type": "content", "content": "a = 1"}},
            {"prediction": {"text": "a = 1"}},
        ),
        (
            {"prediction": {"type": "content", "content": [TEXT_PART, TEXT_PART]}},
            {"prediction": {"text": "yesyes"}},
        ),
        ({"prediction": {"type": "content", "content": ""}}, {}),
    ],
    "logprobs": [
        ({"logprobs": True}, {"output": {"logprobs": 0}}),
        ({"logprobs": False}, {}),
    ],
    "top_logprobs": [({"logprobs": True, "top_logprobs": 3}, {"output": {"logprobs": 3}})],
    "tools": [(TOOLS, {"chat": {"tools": DEFINED}})],
    "tool_choice": [
        (TOOLS | {"tool_choice": "auto"}, {"chat": {"tools": DEFINED}}),
        (
            TOOLS | {"tool_choice": "none"},
            {"chat": {"tools": DEFINED, "tool_choice": {"mode": "TOOL_CHOICE_MODE_NONE"}}},
        ),
        (
            TOOLS | {"tool_choice": "required"},
            {"chat": {"tools": DEFINED, "tool_choice": REQUIRED}},
        ),
        (
            TOOLS | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"chat": {"tools": DEFINED, "tool_choice": REQUIRED | {"tool_names": ["f"]}}},
        ),
    ],
    "parallel_tool_calls": [
        (TOOLS | {"parallel_tool_calls": True}, {"chat": {"tools": DEFINED}}),
        (
            TOOLS | {"tool_choice": "required", "parallel_tool_calls": False},
            {"chat": {"tools": DEFINED, "tool_choice": REQUIRED | {"parallel_calls": False}}},
        ),
    ],
    "reasoning_effort": [
        (
            {"reasoning_effort": "low"},
            {"chat": {"template_arguments_json": '{"reasoning_effort": "low"}'}},
        )
    ],
    "modalities": [({"modalities": ["text"]}, {})],
    "chat_template_kwargs": [
        ({"chat_template_kwargs": {"a": 1}}, {"chat": {"template_arguments_json": '{"a": 1}'}})
    ],
    "add_generation_prompt": [
        ({"add_generation_prompt": False}, {"chat": {"add_generation_prompt": False}})
    ],
    "continue_final_message": [
        ({"continue_final_message": True}, {"chat": {"continue_final_message": True}})
    ],
    "include_reasoning": [({"include_reasoning": False}, {})],
    "thinking_token_budget": [
        ({"thinking_token_budget": 7}, {"stop": {"max_reasoning_tokens": 7}})
    ],
}
TEXT_SPECS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "prompt": [
        ({"prompt": "hö"}, {"text": {"text": "hö"}}),
        ({"prompt": [5]}, {"tokens": {"ids": [5]}}),
    ],
    "max_tokens": [({}, {"stop": {"max_tokens": 16}})],
    "logprobs": [
        ({"logprobs": 0}, {"output": {"logprobs": 0}}),
        ({"logprobs": 5}, {"output": {"logprobs": 5}}),
    ],
    "echo": [
        ({"echo": True}, {"output": {"echo": True}}),
        (
            {"echo": True, "logprobs": 2},
            {"output": {"echo": True, "logprobs": 2, "prompt_logprobs": 2}},
        ),
    ],
    "add_special_tokens": [
        ({"add_special_tokens": False}, {"text": {"text": "hi", "add_special_tokens": False}})
    ],
}  # fmt: skip


def table(route: Route) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    return SPECS | (CHAT_SPECS if route == "chat" else TEXT_SPECS)


def read(body: dict[str, Any], route: Route, *, ignore_unknown: bool = False) -> Asked:
    return asked.read(BODIES[route] | body, route, ignore_unknown=ignore_unknown)


def refused(body: dict[str, Any], route: Route) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        read(body, route)
    assert caught.value.status == 400
    return cast(dict[str, Any], caught.value.body()["error"])


def expected(route: Route, fields: dict[str, Any]) -> pb.GenerationSpec:
    """A request with these fields, besides the prompt of every body and what it has by default."""
    spec = pb.GenerationSpec()
    if route == "chat":
        spec.chat.messages.add(role="CHAT_ROLE_USER", content="hi")
    elif "tokens" not in fields and "text" not in fields:
        spec.text.text = "hi"
    if route == "completions" and "max_tokens" not in fields.get("stop", {}):
        spec.stop.max_tokens = 16
    spec.MergeFrom(pb.GenerationSpec(**fields))
    return spec


@pytest.mark.parametrize("route", ROUTES)
def test_every_obeyed_member_reaches_the_request(route: Route) -> None:
    obeyed = {
        name for name, field in FIELDS.items() if field.use == "obeyed" and route in field.routes
    }
    assert obeyed == set(table(route))
    for name, cases in table(route).items():
        for body, fields in cases:
            [spec] = read(body, route).specs
            assert spec == expected(route, fields), name
            [spec] = read(body | {name: None}, route).specs if name not in BODIES[route] else [spec]
            assert name in BODIES[route] or spec == read(
                {key: value for key, value in body.items() if key != name}, route
            ).specs[0], f"{name}: null is not as if it were absent"  # fmt: skip


def test_members_that_shape_the_answer() -> None:
    plain = read({}, "chat")
    assert (plain.is_stream, plain.wants_usage, plain.wants_ids, plain.n) == (
        False,
        False,
        False,
        1,
    )
    assert (plain.logprobs, plain.echo, plain.has_prompt, plain.model) == (None, False, False, "")
    assert plain.wants_reasoning
    full = read(
        {
            "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 2,
            "return_token_ids": True, "include_reasoning": False, "logprobs": True,
            "top_logprobs": 4,
        },
        "chat",
    )  # fmt: skip
    assert (full.is_stream, full.wants_usage, full.wants_ids, full.n) == (True, True, True, 2)
    assert (full.logprobs, full.model) == (4, "m")
    assert read({"prompt_logprobs": 1}, "chat").has_prompt
    assert not full.wants_reasoning
    assert read({"echo": True}, "completions").echo


VALUES = {"a string": "x", "true or false": True, "an object": {"a": "b"}}


@pytest.mark.parametrize("route", ROUTES)
def test_ignored_members_change_nothing(route: Route) -> None:
    plain = read({}, route)
    for name, field in FIELDS.items():
        if field.use == "ignored" and route in field.routes:
            assert read({name: VALUES[field.kind]}, route) == plain
            assert refused({name: 5}, route) == {
                "message": f"{name}: is an integer; it must be {field.kind}",
                "type": "invalid_request_error",
                "param": name,
                "code": "invalid_type",
            }


@pytest.mark.parametrize("route", ROUTES)
def test_refused_members_say_what_to_send(route: Route) -> None:
    for name, field in FIELDS.items():
        if field.use == "refused" and route in field.routes:
            assert refused({name: ["x"]}, route) == {
                "message": f"{name} is not supported: {field.note}",
                "type": "invalid_request_error",
                "param": name,
                "code": "unsupported_field",
            }
            for nothing in (None, False, [], {}, ""):  # which asks for nothing
                read({name: nothing}, route)


@pytest.mark.parametrize("route", ROUTES)
def test_values_of_another_type_are_named(route: Route) -> None:
    for name, field in FIELDS.items():
        if route not in field.routes or field.kind == "anything":
            continue
        wrong: Any = {"x": 1} if "object" not in field.kind else 1.5
        assert refused({name: wrong}, route)["param"] == name
        assert refused({name: wrong}, route)["code"] == "invalid_type"


def test_unknown_members_are_refused_with_what_may_be_meant() -> None:
    for name, meant in {
        "temprature": "; is it temperature?",
        "max_new_tokens": "; is it max_tokens?",
        "guided_json": "; is it structured_outputs?",
        "enable_thinking": "; is it chat_template_kwargs?",
        "zzzz": "",
    }.items():
        error = refused({name: 1}, "chat")
        assert (error["message"], error["param"]) == (f"there is no {name}{meant}", name)
        assert error["code"] == "unknown_field"
        assert read({name: 1}, "chat", ignore_unknown=True) == read({}, "chat")
    assert refused({"echo": True}, "chat")["message"] == "echo does not belong to this route"
    assert refused({"messages": []}, "completions")["code"] == "unknown_field"


def test_a_prediction_that_is_no_text_is_named() -> None:
    for prediction, name in (
        ({"type": "tokens"}, "prediction.type"),
        ({"content": 5}, "prediction.content"),
        ({"content": ["a"]}, "prediction.content[0]"),
        ({"content": [{"type": "text"}]}, "prediction.content[0].text"),
    ):
        assert refused({"prediction": prediction}, "chat")["param"] == name


def test_the_document_has_the_tables_rows() -> None:
    """`python -m tests.openai.field_table` writes them."""
    assert field_table.shown() == field_table.table()


def test_the_usage_tells_what_became_of_predictions() -> None:
    usage = Usage(3, 1, 9, 2, 8, 6, prediction_draft_tokens=7, accepted_prediction_draft_tokens=5)
    found = usage_of([Result("a", (), usage), Result("b", (), usage)])
    assert found["completion_tokens_details"] == {
        "reasoning_tokens": 4,
        "accepted_prediction_tokens": 10,
        "rejected_prediction_tokens": 4,
    }
