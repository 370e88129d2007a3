"""A model without a tokenizer serves token ids, in and out; what needs text is refused by name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from engine.text import Tokenizer, TokenizerError, TokenizerMissingError
from service.server import load_tokenizer
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import (
    check_course,
    finished_of,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    text_of,
)
from tests.service.real_server import BIN, ROOT, RealServer, clean_environment, real_server
from tests.tiny_models import FAMILIES, greedy_reference, make_model

IDS = {"ids": [1, 2, 3]}
USER = {"role": pb.CHAT_ROLE_USER, "content": "hi"}
NEEDS_TEXT: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": {"text": "hi"}}, "send token ids (tokens)"),
    "chat": ({"chat": {"messages": [USER]}}, "send token ids (tokens)"),
    "stop.stop_strings": ({"stop": {"stop_strings": ["x"]}}, "send stop_token_ids"),
    "stop.include_stop": ({"stop": {"include_stop": True}}, "leave it out"),
    "output.echo": ({"output": {"echo": True}}, "leave it out"),
    "output.token_details": ({"output": {"token_details": True}}, "leave it out"),
    "prediction.text": ({"prediction": {"text": "hi"}}, "send token ids (prediction.tokens)"),
    "structured_output": ({"structured_output": {"regex": "a"}}, "allowed_token_ids"),
}


def ids_spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        **({} if {"text", "chat"} & fields.keys() else {"tokens": IDS}), **fields
    )


async def test_ids_come_out_and_no_text() -> None:
    async with serving(FakeEngine(script=says("abc")), has_tokenizer=False) as h:
        result = await h.generate(ids_spec(stop={"max_tokens": 9}))
        [choice] = result.choices
        assert (bytes(choice.token_ids[:3]), choice.text) == (b"abc", "")
        assert choice.finished.reason == pb.FINISH_REASON_STOP
        events = [
            event
            for message in await h.stream(ids_spec(n=2, stop={"stop_token_ids": [98]}))
            for event in message.events
        ]
        check_course(events, n=2)
        for one in (0, 1):
            assert (ids_of(events, one), text_of(events, one)) == ([97, 98], "")
            assert finished_of(events, one).stop_token_id == 98
        session = h.session()
        await session.add(ids_spec(request_id="a", output={"skip_special_tokens": False}))
        await session.end()
        assert bytes(ids_of(session.events()["a"])[:3]) == b"abc"
        assert "delta" in kinds(session.events()["a"])


async def test_log_probabilities_have_ids_without_text() -> None:
    async with serving(FakeEngine(script=says("ab")), has_tokenizer=False) as h:
        output = {"logprobs": 2, "prompt_logprobs": 1, "record_timestamps": True}
        result = await h.generate(ids_spec(output=output))
    tokens = [*result.accepted.ListFields(), *result.choices[0].tokens, *result.prompt.tokens]
    described = [t for t in tokens if isinstance(t, pb.TokenInfo)]
    assert [t.id for t in described[:2]] == [97, 98]
    assert all(t.candidates for t in described[:2])
    for token in described:
        assert (token.text, token.bytes) == ("", b"")
        assert all((c.text, c.bytes) == ("", b"") for c in token.candidates)


@pytest.mark.parametrize("field", NEEDS_TEXT)
async def test_what_needs_text_is_refused_by_name(field: str) -> None:
    fields, said = NEEDS_TEXT[field]
    async with serving(has_tokenizer=False) as h:
        error = await refused(h.generate(ids_spec(**fields)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FIELD")
        assert error.field == f"spec.{field}"
        assert "the model has no tokenizer" in error.message
        assert said in error.message
        assert not h.engine.submitted
        session = h.session()
        await session.add(ids_spec(**fields), 3)
        await session.add(ids_spec(request_id="next"), 4)
        await session.end()
        [rejection] = [r for m in session.messages for r in m.rejections]
        assert (rejection.command_id, rejection.status.code) == (3, 12)
        assert kinds(session.events()["next"])[-1] == "finished"


async def test_tokenize_and_detokenize_are_not_there() -> None:
    async with serving(has_tokenizer=False) as h:
        for call in (
            h.models.Tokenize(model.TokenizeRequest(text={"text": "x"})),
            h.models.Tokenize(model.TokenizeRequest(chat={"messages": [USER]})),
            h.models.Detokenize(model.DetokenizeRequest(token_ids=[1])),
        ):
            error = await refused(call)
            assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_TOKENIZER")
            assert "send tokens" in error.message


async def test_the_card_and_the_capabilities_say_so() -> None:
    async with serving(has_tokenizer=False) as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        given = card.capabilities
        assert not {"chat", "tools", "content_parts", "structured_output"} & set(given.names)
        assert given.input == model.InputCapabilities(token_ids=True)
        assert not given.output.structured_output
        assert given.output.logprobs
        for name in ("chat", "structured_output"):
            request = rpc.GenerateRequest(spec=ids_spec(), required_capabilities=[name])
            error = await refused(h.generation.Generate(request))
            assert (error.code, error.reason) == (
                grpc.StatusCode.UNIMPLEMENTED,
                "CAPABILITY_MISSING",
            )
    async with serving() as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        assert card.capabilities.input.text
        await h.generate(spec(structured_output={"regex": "a"}))


def test_a_broken_tokenizer_is_not_taken_for_none(tmp_path: Path) -> None:
    info = model_info(path=str(tmp_path))
    assert load_tokenizer(info) is None
    with pytest.raises(TokenizerMissingError, match="token ids alone"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError):
        load_tokenizer(info)


# ---- as a process ------------------------------------------------------------------------------

PROMPT, NEW_TOKENS = [7, 8, 9, 10], 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, list[int]]]:
    """A server of a tiny model without a tokenizer, and what the model says to PROMPT."""
    config = FAMILIES["llama"]()
    tiny = make_model(config)
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.save_pretrained(path)
    with real_server("--model", str(path), "--listen", "127.0.0.1:0") as server:
        server.wait_until_ready()
        yield server, greedy_reference(tiny, PROMPT, NEW_TOKENS)


def command(server: RealServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "headrace"), *arguments, "--target", server.addresses[0]],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_start_says_so(served: tuple[RealServer, list[int]]) -> None:
    server, _ = served
    assert "No tokenizer: prompts and outputs are token ids." in server.said
    assert '--token-ids "1 2 3"' in server.said
    assert "has no tokenizer.json: token ids alone can be sent and read" in server.said


def test_the_client_gets_the_models_ids(served: tuple[RealServer, list[int]]) -> None:
    server, expected = served
    with headrace.Client(server.addresses[0]) as client:
        assert not client.model().capabilities.input.text
        result = client.generate(PROMPT, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        assert (list(result.token_ids), result.text) == (expected, "")
        for call in (
            lambda: client.generate("hi"),
            lambda: client.generate([headrace.Message.user("hi")]),
            lambda: client.generate(PROMPT, json_object=True),
            lambda: client.tokenize("hi"),
            lambda: client.detokenize([1]),
        ):
            with pytest.raises(headrace.NotSupportedError, match=r"no tokenizer|no chat template"):
                call()


def test_the_command_reads_and_writes_ids(served: tuple[RealServer, list[int]]) -> None:
    server, expected = served
    options = ["--temperature", "0", "--max-tokens", str(NEW_TOKENS), "-o", "ignore_eos=true"]
    done = command(server, "generate", "--token-ids", "7, 8 9,10", *options)
    assert (done.returncode, [int(word) for word in done.stdout.split()]) == (0, expected)
    plain = command(server, "generate", "hi")
    assert plain.returncode != 0
    assert "no tokenizer; send token ids" in plain.stderr
    chat = command(server, "chat")
    assert chat.returncode != 0
    assert "has no tokenizer; use `headrace generate --token-ids`" in chat.stderr
    for wrong in (["--token-ids", "7 x"], ["--token-ids", "--chat", "7"]):
        refused_ = command(server, "generate", *wrong)
        assert (refused_.returncode, "--token-ids" in refused_.stderr) == (2, True)
