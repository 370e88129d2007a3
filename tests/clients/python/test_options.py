from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import headrace
import pytest
from headrace import Message, ToolChoice, build_spec
from headrace._channel import make_settings, service_config
from headrace._targets import is_local, normalise_target
from headrace.options import OPTION_NAMES
from headrace.v1 import generation_pb2 as pb

EXAMPLES: dict[str, Any] = {
    "request_id": "a", "n": 2, "adapter": "x", "temperature": 0.5, "top_k": 3, "top_p": 0.5,
    "min_p": 0.25, "typical_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": -1.0,
    "frequency_penalty": 1.0, "no_repeat_ngram_size": 2, "logit_bias": {3: -1.5},
    "allowed_token_ids": [1], "banned_token_ids": [2], "seed": 2**63 - 1, "max_tokens": 0,
    "min_tokens": 1, "stop": ["a", "b"], "stop_token_ids": [1], "eos_token_ids": [2],
    "ignore_eos": True, "include_stop": True, "delivery": "final", "min_tokens_per_delta": 4,
    "logprobs": 0, "prompt_logprobs": 1, "logprob_token_ids": [5], "echo": True,
    "token_details": True, "record_timestamps": True, "skip_special_tokens": False,
    "omit_text": True, "raw_text": True,
    "json_schema": {"type": "object"}, "json_object": True, "regex": "a+",
    "grammar": "start: x", "choices": ["a", "b"], "structural_tag": "{}",
    "flexible_whitespace": True, "priority": -3,
    "time_limit": 1.5, "cache_salt": "s", "bypass_prefix_cache": True, "truncate_prompt_to": 9,
    "truncation_side": "right", "add_special_tokens": False, "tools": [{"name": "f"}],
    "add_generation_prompt": True, "continue_final_message": True, "template_arguments": {"a": 1},
    "tool_choice": ToolChoice("required", ["f"]), "parallel_tool_calls": False,
    "max_reasoning_tokens": 0, "prediction": "b",
    "model": "demo", "labels": {"team": "search"},
}  # fmt: skip
CHAT_ONLY = {
    "tools", "add_generation_prompt", "continue_final_message", "template_arguments",
    "tool_choice", "parallel_tool_calls",
}  # fmt: skip


def leaf_paths(descriptor: Any, prefix: str = "") -> set[str]:
    paths = set()
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.full_name.startswith("headrace") and not field.is_repeated:
            paths |= leaf_paths(inner, f"{prefix}{field.name}.")
        else:
            paths.add(prefix + field.name)
    return paths


def set_paths(message: Any, prefix: str = "") -> set[str]:
    paths = set()
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is not None and inner.full_name.startswith("headrace") and not field.is_repeated:
            paths |= set_paths(value, f"{prefix}{field.name}.")
        else:
            paths.add(prefix + field.name)
    return paths


def spec_for(name: str) -> pb.GenerationSpec:
    prompt: Any = [Message.user("hi")] if name in CHAT_ONLY else "hi"
    return build_spec(prompt, {name: EXAMPLES[name]})  # type: ignore[arg-type]


def test_every_field_of_the_contract_can_be_reached() -> None:
    assert EXAMPLES.keys() == OPTION_NAMES
    reached = {path for name in OPTION_NAMES for path in set_paths(spec_for(name))}
    reached |= set_paths(build_spec([1, 2], {"prediction": [3]}))
    assert reached == leaf_paths(pb.GenerationSpec.DESCRIPTOR)


def test_absent_options_are_absent() -> None:
    spec = build_spec("hi", {"temperature": None})  # type: ignore[arg-type]
    assert [field.name for field, _ in spec.ListFields()] == ["text"]
    assert build_spec("hi", {"temperature": 0.0}).sampling.HasField("temperature")


def test_options_are_set_on_a_copy_of_a_raw_spec() -> None:
    raw = pb.GenerationSpec(tokens=pb.TokenInput(ids=[1]))
    raw.stop.stop_strings.append("old")
    spec = build_spec(raw, {"stop": "new", "time_limit": timedelta(milliseconds=1500)})
    assert list(spec.stop.stop_strings) == ["new"]
    assert spec.scheduling.time_limit.ToMilliseconds() == 1500
    assert list(raw.stop.stop_strings) == ["old"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"delivery": "soon"}, "delivery"),
        ({"time_limit": float("nan")}, "time_limit"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": []}, "tools"),
        ({"choices": "ab"}, "choices"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
    ],
)
def test_values_that_do_not_fit_name_their_option(options: Any, field: str) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        build_spec("hi", options)
    assert caught.value.fields[0].field == field
    assert isinstance(caught.value, ValueError)


def test_prompts_of_wrong_types() -> None:
    with pytest.raises(TypeError, match="no such generation option: temprature"):
        build_spec("hi", {"temprature": 1})  # type: ignore[arg-type]
    prompt: Any
    for prompt in (b"hi", {"role": "user"}, 3, ["a"]):
        with pytest.raises(TypeError):
            build_spec(prompt)
    bad: Any
    for bad in ([], [-1], "\ud800", [{"role": "robot"}], [{"role": "user", "colour": 1}]):
        with pytest.raises(headrace.InvalidArgumentError):
            build_spec(bad)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("response_format", "json_schema"),
        ("timeout", "time_limit, or the timeout of the call itself"),
    ],
)
def test_an_unknown_option_is_told_with_what_may_be_meant(name: str, meant: str) -> None:
    options: Any = {name: 1}
    with pytest.raises(TypeError, match=rf"{name} \(is it {meant}\?\)$"):
        build_spec("hi", options)
    with headrace.Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=meant):
        client.generate("hi", **options) if name != "timeout" else build_spec("hi", options)


def test_an_unknown_option_that_resembles_none_is_told_alone() -> None:
    with pytest.raises(TypeError, match=r"option: qqqq$"):
        build_spec("hi", {"qqqq": 1})  # type: ignore[arg-type]


def test_every_error_has_fields() -> None:
    assert headrace.UnavailableError("away").fields == ()
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        build_spec("hi", {"delivery": "never"})  # type: ignore[typeddict-item]
    assert [one.field for one in caught.value.fields] == ["delivery"]


PROGRAM = """
import headrace
from headrace import Message, MessageDict

def conversation(client: headrace.Client) -> None:
    client.generate([{"role": "user", "content": "How high is the river?"}])
    question = [{"role": "user", "content": "How high is the river?"}]
    client.generate(question)
    client.run_tools(question, [])
    said: list[MessageDict] = [{"role": "user", "content": "How high is the river?"}]
    client.generate(said)
    client.generate([Message.user("hi"), {"role": "assistant", "content": "hello"}])
    client.generate([Message.user("hi"), *said])
    client.tokenize(question)

def passed_on(
    client: headrace.Client, temperature: float | None = None, stop: list[str] | None = None
) -> None:
    client.generate("x", temperature=temperature, stop=stop)

def wrong(client: headrace.Client) -> None:
    client.generate("x", max_token=3)
"""


def test_documented_calls_are_well_typed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    source = Path(headrace.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(source)},
        check=False,
    )
    faults = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(faults) == 1, done.stdout
    assert 'Unexpected keyword argument "max_token"' in faults[0]


def test_options_that_no_prompt_is_made_of_are_not_tokenized() -> None:
    with headrace.Client("127.0.0.1:1") as client:
        for name in ("tool_choice", "temperature", "colour"):
            with pytest.raises(TypeError, match=f"no such option of a conversation: {name}"):
                client.tokenize([Message.user("hi")], **{name: "auto"})


def test_an_option_of_the_other_kind_of_prompt_is_refused_and_not_ignored() -> None:
    with headrace.Client("127.0.0.1:1") as client:
        with pytest.raises(headrace.InvalidArgumentError, match="belongs to a prompt of messages"):
            client.tokenize("hi", add_generation_prompt=True)
        with pytest.raises(headrace.InvalidArgumentError, match="belongs to a text prompt"):
            client.tokenize([Message.user("hi")], add_special_tokens=False)


def test_messages_from_dictionaries() -> None:
    call: Any = {"id": "1", "name": "f", "arguments": {"x": 1}}
    messages: Any = [{"role": "assistant", "tool_calls": [call]}]
    spec = build_spec(messages)
    assert spec.chat.messages[0].tool_calls[0].arguments_json == '{"x": 1}'


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("localhost", "localhost:50051"),
        ("host:1", "host:1"),
        ("dns:///host", "dns:///host:50051"),
        ("[::1]", "[::1]:50051"),
        ("/run/x.sock", "unix:/run/x.sock"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_targets(given: str, wanted: str) -> None:
    assert normalise_target(given) == wanted


def test_a_token_does_not_travel_in_clear_text_unasked() -> None:
    with pytest.raises(ValueError, match="in clear text"):
        headrace.Client("example.org:1", token="secret")
    headrace.Client("example.org:1", token="secret", tls=False).close()
    with pytest.raises(ValueError, match="is a URL"):
        headrace.Client("http://localhost:1")
    assert is_local("[::1]:50051")
    assert not is_local("10.0.0.1:1")


def test_only_unary_calls_are_retried() -> None:
    names = service_config(3, "pick_first")["methodConfig"][0]["name"]
    assert not {"GenerateStream", "StreamResult"} & {name.get("method") for name in names}
    assert "methodConfig" not in service_config(0, "round_robin")


def test_secrets_are_not_in_reprs() -> None:
    settings = make_settings(
        "localhost", tls=None, ca=None, client_cert=None, client_key=None, server_name=None,
        token="hush", token_file=None, metadata=None, keepalive=None, max_message_bytes=1,
        retries=0, load_balancing="pick_first", channel_options=(),
    )  # fmt: skip
    assert "hush" not in repr(settings)


def test_errors_survive_pickling() -> None:
    with pytest.raises(headrace.InvalidArgumentError) as caught:
        build_spec("hi", {"top_k": -1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.fields == caught.value.fields


def test_friendly_forms() -> None:
    schema = {"type": "object", "title": "é"}
    for given in (schema, json.dumps(schema)):
        text = build_spec("x", {"json_schema": given}).structured_output.json_schema
        assert json.loads(text) == schema
    assert not build_spec("x", {"json_object": False}).HasField("structured_output")
    assert build_spec("x", {"json_object": False, "regex": "a"}).structured_output.regex == "a"
    with pytest.raises(headrace.InvalidArgumentError, match="cannot be combined"):
        build_spec("x", {"json_object": True, "regex": "a"})
