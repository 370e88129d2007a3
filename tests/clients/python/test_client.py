from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import headrace
import pytest
from headrace import CancelStatus, Client, FinishReason, HealthStatus, Message
from headrace.cli.app import app
from headrace.v1 import generation_pb2 as pb
from typer.testing import CliRunner

from tests.clients.python.scripted import ScriptedServer


def test_generate(client: Client, server: ScriptedServer) -> None:
    result = client.generate("to be or not", max_tokens=3, stop="x")
    assert (result.text, result.token_ids) == ("to be or", (2, 2, 2))
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.seed, result.prompt and result.prompt.prompt_tokens) == (7, 4)
    assert result.timings.first_token == 0.25
    assert result.usage.completion_tokens == 3
    assert result.to_dict()["finish_reason"] == "length"
    assert client.generate("a b", stop="b").stop_string == "b"


def test_prompts(client: Client) -> None:
    assert client.generate([5, 6]).text == "5 6"
    assert client.generate([Message.system("x"), Message.user("hello you")]).text == "hello you"
    raw = pb.GenerationSpec(text=pb.TextInput(text="raw one"))
    assert client.generate(raw, logprobs=0).logprobs == (-0.5, -0.5)


def test_errors_have_their_details(client: Client) -> None:
    with pytest.raises(headrace.InvalidArgumentError) as refused:
        client.generate("refuse")
    violation = headrace.FieldViolation("sampling.top_p", "must be above 0")
    assert refused.value.fields == (violation,)
    assert (refused.value.code, refused.value.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "BAD_FIELD",
    )
    with pytest.raises(headrace.InternalError) as failed:
        client.generate("fail")
    assert failed.value.error_id == "e-1"
    with pytest.raises(headrace.NotSupportedError):
        client.generate("unsupported")


def test_queue_full_tells_when_to_come_back(server: ScriptedServer) -> None:
    with Client(server.target, retries=0) as client:
        with pytest.raises(headrace.ResourceExhaustedError) as full:
            client.generate("busy")
        assert full.value.retry_after == 0.02


def test_unary_calls_are_tried_again(client: Client, server: ScriptedServer) -> None:
    server.unavailable_left = 1
    assert client.generate("busy now").text == "busy now"


def test_no_server() -> None:
    with Client("127.0.0.1:1", retries=0) as client:
        with pytest.raises(
            headrace.UnavailableError, match=r"cannot reach .* at 127\.0\.0\.1:1"
        ) as e:
            client.generate("x")
        assert not e.value.reached_server
        with pytest.raises(headrace.UnavailableError), client.stream("x") as stream:
            next(stream)
        with pytest.raises(headrace.UnavailableError):
            client.wait_until_ready(timeout=0.0)
        with client.session() as session, pytest.raises(headrace.UnavailableError):
            session.submit("x").result()


def test_closed_client(server: ScriptedServer) -> None:
    client = Client(server.target)
    client.close()
    with pytest.raises(headrace.UnavailableError, match="closed"):
        client.generate("x")
    with pytest.raises(headrace.UnavailableError, match="closed"):
        client.stream("x").result()
    with pytest.raises(headrace.UnavailableError, match="closed"):
        client.session()


def test_stream(client: Client, server: ScriptedServer) -> None:
    with client.stream("one two three") as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["one", " two", " three"]
    assert stream.result().text == "one two three"
    assert stream.accepted
    assert stream.accepted.request_id == stream.request_id
    server.wait_for(lambda: not server.live)
    assert server.cancelled == []
    assert client.stream("no block").result().text == "no block"


def test_breaking_out_cancels(client: Client, server: ScriptedServer) -> None:
    with client.stream("hold on") as stream:
        for chunk in stream:
            assert chunk.text == "hold"
            break
    server.wait_for(lambda: server.cancelled == [stream.request_id])
    assert stream.result().text == "hold"
    assert stream.result().finish_reason is FinishReason.UNKNOWN


def test_cancelling_a_stream_gives_what_there_is(client: Client) -> None:
    with client.stream("hold on") as stream:
        next(stream)
        stream.cancel()
        assert stream.result().finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("prompt", ["gap b c", "twice b c"])
def test_a_broken_order_of_events_is_noticed(client: Client, prompt: str) -> None:
    with pytest.raises(headrace.ProtocolError) as caught:
        client.stream(prompt).result()
    assert caught.value.partial
    assert caught.value.partial.text == prompt.split()[0]


def test_a_stream_that_fails_keeps_what_it_had(client: Client) -> None:
    with client.stream("fail") as stream:
        assert next(stream).text == "so far"
        with pytest.raises(headrace.InternalError) as caught:
            next(stream)
    assert caught.value.partial
    assert caught.value.partial.text == "so far"


def test_several_choices(client: Client) -> None:
    result = client.stream("a b", n=2).result()
    assert [choice.text for choice in result.choices] == ["a b", ""]
    assert len(result.to_dict()["choices"]) == 2


def test_requests_that_run_by_themselves(client: Client, server: ScriptedServer) -> None:
    accepted = client.add_request("hold on")
    with pytest.raises(headrace.DeadlineExceededError):
        client.get_result(accepted.request_id, timeout=0.0)
    with client.attach(accepted.request_id) as stream:
        assert next(stream).text == "hold"
    assert server.cancelled == []
    with client.attach(accepted.request_id) as stream:
        next(stream)
        server.release(accepted.request_id)
        assert list(stream) == []
    assert client.get_result(accepted.request_id).finish_reason is FinishReason.STOP
    with pytest.raises(headrace.NotFoundError):
        client.get_result("nobody")


def test_a_result_of_several_answers_is_read_whole(client: Client, server: ScriptedServer) -> None:
    server.answer_bytes = 200_000
    words = [letter * 90_000 for letter in "abcdefgh"]
    client.add_request(" ".join(words), request_id="a")
    assert client.get_result("a", timeout=0).text == " ".join(words)
    assert len(server.polls) > 3
    assert client.get_result("a", timeout=1e-6).text == " ".join(words)
    assert client.get_result("a").text == " ".join(words)


def test_a_request_that_runs_is_not_waited_for_beyond_the_timeout(
    client: Client, server: ScriptedServer
) -> None:
    client.add_request("hold on", request_id="a")
    server.on_poll = lambda: server.live["a"].send(delta={"text": " on"})
    with pytest.raises(headrace.DeadlineExceededError) as caught:
        client.get_result("a", timeout=0)
    assert caught.value.partial
    assert caught.value.partial.text.startswith("hold on")
    assert len(server.polls) <= 3


def test_cancel(client: Client, server: ScriptedServer) -> None:
    client.add_request("hold", request_id="a")
    client.add_request("x", request_id="b")
    with pytest.raises(headrace.AlreadyExistsError):
        client.add_request("hold", request_id="a")
    assert client.cancel(["a", "b", "c"]) == {
        "a": CancelStatus.CANCELLED,
        "b": CancelStatus.ALREADY_FINISHED,
        "c": CancelStatus.NOT_FOUND,
    }
    assert client.cancel([]) == {}
    assert len(client.cancel(str(i) for i in range(1500))) == 1500


def test_the_model_and_the_server(client: Client, server: ScriptedServer) -> None:
    card = client.model()
    assert (card.name, card.limits.max_lease, list(card.capabilities.names)) == (
        "scripted",
        90.0,
        ["chat"],
    )
    assert (card.quantization, card.limits.max_hold) == ("", 1.5)
    assert client.tokenize("a bcd").token_ids == (1, 3)
    assert client.tokenize([Message.user("ab")], add_generation_prompt=False).token_ids == (2,)
    assert client.detokenize([1, 2]) == "x xx"
    assert client.health() is HealthStatus.SERVING
    assert client.health("nobody") is HealthStatus.SERVICE_UNKNOWN
    client.wait_until_ready()


def test_token(server: ScriptedServer) -> None:
    with Client(server.target, token="t") as client:
        client.generate("x")
    assert server.token_metadata == ["Bearer t"]


def test_unix_socket(tmp_path: object) -> None:
    server = ScriptedServer(f"unix:{tmp_path}/s.sock")
    with Client(f"{tmp_path}/s.sock") as client:
        assert client.generate("over a socket").text == "over a socket"
    server.stop()


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, headrace.cli; "
        "sys.exit(bool({'torch', 'transformers', 'engine', 'service'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("servers", [1, 2])
def test_a_token_file_is_read_again(servers: int, server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    targets = [server.target, server.target.replace("127.0.0.1", "localhost")][:servers]
    with headrace.Client(targets, token_file=path) as client:
        client.generate("a")
        path.write_text("second\n")
        client.generate("a")
        client.generate("a")
        assert server.token_metadata == ["Bearer first", "Bearer second", "Bearer second"]
        for content in (b"", b"\xff", b"a\nb"):
            path.write_bytes(content)
            with pytest.raises(headrace.InvalidArgumentError, match=r"^token_file: .*token"):
                client.generate("a")
        path.unlink()
        with pytest.raises(headrace.InvalidArgumentError, match=r"token_file: .*cannot be read"):
            next(client.stream("a"))
        path.write_text("third")
        client.generate("a")
        assert server.token_metadata[-1] == "Bearer third"


def test_a_token_file_excludes_a_token_and_plain_text_to_another_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        headrace.Client(token="a", token_file=tmp_path / "token")
    with pytest.raises(ValueError, match="in clear text"):
        headrace.Client("192.0.2.1:1", token_file=tmp_path / "token")


def test_the_command_takes_a_token_file(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("kept")
    words = ["generate", "a b", "--target", server.target, "--token", "given"]
    done = CliRunner().invoke(app, [*words, "--token-file", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output == "a b\n"
    done = CliRunner().invoke(app, [*words, "--token-file", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert "token_file" in done.output


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_no_proxy_leads_to_this_machine(
    name: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    port = server.target.rpartition(":")[2]
    for target in (server.target, f"localhost:{port}", f"dns:///localhost:{port}"):
        with headrace.Client(target, retries=0) as client:
            assert client.generate("a b").text == "a b"
    with headrace.Client("192.0.2.1:1", retries=0) as client:
        for call in (client.model, client.stream("a").result):
            with pytest.raises(headrace.UnavailableError) as caught:
                call()
            assert f"{name} names the proxy 127.0.0.1:9)" in caught.value.message
            assert "secret" not in caught.value.message
