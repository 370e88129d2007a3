"""What nobody should send to the HTTP door: each is answered as OpenAI's errors are, or its
connection ends, and the door goes on for everybody else.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import headrace
import pytest
from headrace.openai.bodies import MAX_BYTES, MAX_VALUES
from headrace.openai.fields import FIELDS
from headrace.openai.protocol import MAX_HEAD_BYTES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.models import DEMO
from benchmarks.rig.serving import Process
from tests.campaign.door.attacks import ATTACKS, Neighbour, attacked, open_door
from tests.campaign.door.part import DOOR_BYTES
from tests.campaign.hostile.server import OPERATOR, WITNESS, Server
from tests.service.real_server import RealServer, real_server

PATIENCE_S = 6.0
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "Hello."}
SECRET = "sk-hostile-5ec3e7"


class There(NamedTuple):
    server: RealServer
    door: Process


class Answer(NamedTuple):
    """status: 0: the connection ended without an answer. error: OpenAI's object."""

    status: int
    head: str
    body: bytes
    error: Any

    @property
    def code(self) -> str | None:
        code: str | None = self.error["code"]
        return code


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    folder = tmp_path_factory.mktemp("door")
    with real_server("--dtype", "float32", "--listen", "127.0.0.1:0") as server:
        server.wait_until_ready()
        with open_door(server.addresses[0], folder) as door:
            yield There(server, door)
            said = door.said().splitlines()
            assert len(said) == 1, said  # that it is ready: no input is a line of the log


@pytest.fixture(scope="module")
def port(there: There) -> int:
    return there.door.port


def send(port: int, data: bytes) -> Answer:
    """One answer; of several, the last but what belongs to the first."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        found = b""
        with contextlib.suppress(ConnectionError):  # it was refused before it was all said
            sock.sendall(data)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                found += piece
    if not found:
        return Answer(0, "", b"", None)
    head, _, body = found.partition(b"\r\n\r\n")
    status = int(head[9:12])
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return Answer(status, head.decode("latin-1"), body, error)
    return Answer(status, head.decode("latin-1"), body, None)


def raw(*lines: str, body: bytes = b"", method: str = "POST", target: str = CHAT) -> bytes:
    """A request with exactly these lines as headers."""
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def post(port: int, body: Any, *lines: str, target: str = CHAT) -> Answer:
    data = (
        body if isinstance(body, bytes) else json.dumps(body).replace("Infinity", "1e999").encode()
    )
    head = ["Host: localhost", "Connection: close", f"Content-Length: {len(data)}"]
    if not any(line.lower().startswith("content-type") for line in lines):
        head.append("Content-Type: application/json")
    return send(port, raw(*head, *lines, body=data, target=target))


def chat(port: int, **members: Any) -> Answer:
    return post(port, {"messages": [USER], "max_tokens": 1, **members})


def get(port: int, *lines: str, target: str = "/v1/models") -> Answer:
    return send(port, raw(*lines, "Connection: close", method="GET", target=target))


# ---- HTTP ----------------------------------------------------------------------------------------

HERE = "Host: localhost"
TYPE = "Content-Type: application/json"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (raw(HERE, TYPE, "Content-Length: 2", "Content-Length: 2", body=b"{}"), 400),
        (raw(HERE, TYPE, "Content-Length: 2", "Content-Length: 3", body=b"{} "), 400),
        (raw(HERE, TYPE, "Content-Length: 2", "Transfer-Encoding: chunked", body=b"{}"), 400),
        (raw(HERE, TYPE, "Content-Length: -1", body=b"{}"), 400),
        (raw(HERE, TYPE, "Content-Length: 2_0", body=b"{}"), 400),
        (raw(HERE, TYPE, "Content-Length: 99999999999999999999", body=b"{}"), 400),
        (raw(HERE, TYPE, "Transfer-Encoding: gzip", body=b"{}"), 400),
        (raw(HERE, TYPE, "Transfer-Encoding: chunked", body=b"xyz\r\n{}"), 400),
        (raw(HERE, TYPE, "Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n{}"), 400),
        (raw(HERE, "X-Folded: a\r\n b", method="GET", target="/health"), 400),
        (raw(HERE, "X-Nul: a\0b", method="GET", target="/health"), 400),
        (raw(HERE, "X-\0: a", method="GET", target="/health"), 400),
        (raw(HERE, "X Space: a", method="GET", target="/health"), 400),
        (raw(HERE, "X-Space : a", method="GET", target="/health"), 400),
        (raw(HERE, "X-Cr: a\rb", method="GET", target="/health"), 400),
        (raw(HERE, method="GET", target="/h\x01"), 400),
        (raw(HERE, method="GET", target="/h\xe9"), 400),
        (raw(HERE, method="GET", target="http://localhost/health"), 400),
        (raw(HERE, method="GET", target="http://evil.example/health"), 400),
        (raw(HERE, method="GET", target="http://localhost"), 400),
        (raw(HERE, method="GET", target="localhost/health"), 400),
        (raw(HERE, method="OPTIONS", target="*"), 400),
        (raw(HERE, method="CONNECT", target="localhost:80"), 400),
        (raw(HERE, method="BREW", target="/health"), 400),
        (b"GET /health\r\n\r\n", 421),
        (b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        (raw(HERE, "X-Long: " + "a" * MAX_HEAD_BYTES, method="GET", target="/health"), 431),
        (raw(HERE, *["X: y"] * (MAX_HEAD_BYTES // 2), method="GET", target="/health"), 431),
        (raw(HERE, method="GET", target="/" + "a" * MAX_HEAD_BYTES), 431),
        (raw(HERE, "X-Long: " + "a" * (1 << 20), method="GET", target="/health"), 431),
    ],
)
def test_what_is_no_http_is_refused(port: int, data: bytes, status: int) -> None:
    assert send(port, data).status == status


@pytest.mark.parametrize(
    "body",
    [
        b"5;" + b"a" * 1_000_000,
        b"0" * 1_000_000,
        b"2\r\n{}\r\n0\r\nx: " + b"y" * 1_000_000,
        b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 100_000,
    ],
    ids=["extension", "size", "trailer", "trailers"],
)
def test_what_stands_around_chunks_has_a_bound(port: int, body: bytes) -> None:
    found = send(port, raw(HERE, TYPE, "Transfer-Encoding: chunked", body=body))
    assert found.status in (400, 431)


def test_a_body_that_is_too_large_gets_its_answer_although_it_goes_on(port: int) -> None:
    data = b'{"messages":' + b"[" * (2 * MAX_BYTES)
    found = post(port, data)
    assert (found.status, found.code) == (413, "body_too_large")
    head = raw(HERE, TYPE, f"Content-Length: {2 * MAX_BYTES}")
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.sendall(head + b" " * (2 * MAX_BYTES))
        sock.sendall(raw(HERE, "Connection: close", method="GET", target="/health"))
        said = b"".join(iter(lambda: sock.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 413")
    assert said.endswith(b'{"status":"ok"}')


def test_an_offer_of_another_protocol_is_ignored(port: int) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    body = json.dumps({"messages": [USER], "max_tokens": 1, "user": "\r\nUpgrade: x"}).encode()
    first = raw(HERE, TYPE, *offer, f"Content-Length: {len(body)}", body=body)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        for request in (first, raw(HERE, *offer, method="GET", target="/health")):
            sock.sendall(request)
            answer = HTTPResponse(sock)
            answer.begin()
            assert answer.status == 200
            answer.read()  # all of it, although it may come in several packets


def test_an_offer_that_comes_in_two_pieces_is_refused(port: int) -> None:
    head = raw(HERE, "Connection: Upgrade", "Upgrade: websocket", method="GET", target="/health")
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before, _, after = head.partition(b"Upgrade: w")
        sock.sendall(before + b"Upg")
        assert not select.select([sock], [], [], 0.2)[0]
        sock.sendall(b"rade: w" + after)
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "members",
    [
        {"max_tokens": None, "stop": ["a", "e", "i"]},
        {"messages": [USER, {"role": "tool", "content": "a", "tool_call_id": "x"}]},
    ],
)
def test_what_looks_odd_may_be_right(port: int, members: dict[str, Any]) -> None:
    assert chat(port, **members).status == 200


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.0.1:1",
        "[::1]", "[::1]:8000", "192.0.2.7:80",
    ],
)  # fmt: skip
def test_an_address_or_localhost_is_let_in(port: int, host: str) -> None:
    assert get(port, f"Host: {host}").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "evil.example.", "localhost@evil.example", "evil.example@localhost", "user:pw@127.0.0.1",
        "localhost:80:80", "localhost/evil", "localhost evil.example", "localhost,evil.example",
        "", ".", "..localhost", "127.0.0.1.", "0x7f.1", "2130706433", "127.1", "[::1].evil.example",
        "::1.evil.example", "[evil.example]", "localhost\xe9", "xn--lcalhost-n2a", "*",
    ],
)  # fmt: skip
def test_another_host_reaches_no_handler(port: int, host: str) -> None:
    found = get(port, f"Host: {host}")
    assert (found.status, found.code) == (421, "host_not_allowed")


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
def test_there_is_one_host(port: int, hosts: tuple[str, ...]) -> None:
    assert get(port, *(f"Host: {host}" for host in hosts)).status == 421


@pytest.mark.parametrize(
    "origin",
    [
        "null", "", "http://evil.example", "http://localhost", "http://localhost:8000",
        "http://127.0.0.1:{port}", "https://127.0.0.1", "file://", "http://localhost.evil.example",
    ],
)  # fmt: skip
def test_a_page_may_not_ask(port: int, origin: str) -> None:
    found = get(port, HERE, f"Origin: {origin.format(port=port)}")
    assert (found.status, found.code) == (403, "origin_not_allowed")
    assert "access-control" not in found.head.lower()


@pytest.mark.parametrize("name", ["api_key", "API_KEY", "key", "access_token", "%61pi_key"])
def test_a_token_in_the_address_is_refused_and_in_no_log(there: There, name: str) -> None:
    found = get(there.door.port, HERE, target=f"/v1/models?x=1&{name}={SECRET}")
    assert (found.status, found.code) == (400, "token_in_url")
    assert SECRET not in found.head + found.body.decode() + there.door.said() + there.server.said


@pytest.mark.parametrize("token", ["a" * (1 << 20), "a" * 9000, "é", "a\tb"])
def test_a_token_that_cannot_be_passed_on_is_refused(port: int, token: str) -> None:
    found = chat_with(port, f"Authorization: Bearer {token}")
    assert found.status in (401, 431)


def chat_with(port: int, *lines: str, **members: Any) -> Answer:
    return post(port, {"messages": [USER], "max_tokens": 1, **members}, *lines)


@pytest.mark.parametrize("name", ["X-Request-Id", "Idempotency-Key", "traceparent", "tracestate"])
@pytest.mark.parametrize("value", ["", "a" * 8000, "é", "a\tb", "../../x", "a b", "{}", "0" * 128])
def test_names_of_a_request_may_be_anything(port: int, name: str, value: str) -> None:
    found = chat_with(port, f"{name}: {value}")
    assert found.status == 200
    assert "\r\nx-request-id: " in found.head


# ---- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "json"),
        (b"{", 400, "json"),
        (b"[]", 400, "json"),
        (b"null", 400, "json"),
        (b'{"messages": [], "messages": []}', 400, "json"),
        (b'{"temperature": NaN}', 400, "json"),
        (b'{"temperature": -Infinity}', 400, "json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "json"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400, "json"),
        (b"\xff\xfe{\x00}\x00", 400, "json"),
        (b'{"n": ' + b"9" * 10_000 + b"}", 400, "json"),
        (b"[" * 100_000, 400, "json"),
        (b'{"response_format": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, 400, "json"),
        (b"[" * (MAX_VALUES + 1), 413, "body_too_large"),
    ],
)
def test_what_is_no_json_is_refused(port: int, body: bytes, status: int, code: str) -> None:
    found = post(port, body)
    assert (found.status, found.code) == (status, code)


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


BAD: dict[str, tuple[dict[str, Any], str | None]] = {
    "n": ({"n": 10**9}, "n"),
    "n is huge": ({"n": 10**400}, "n"),
    "n is negative": ({"n": -1}, "n"),
    "many stops": ({"stop": [f"a{i}" for i in range(100_000)]}, "stop"),
    "a long stop": ({"stop": "a" * 100_000}, "stop[0]"),
    "an empty stop": ({"stop": ""}, "stop[0]"),
    "stop of others": ({"stop": [1]}, "stop[0]"),
    "no messages": ({"messages": []}, "messages"),
    "many messages": ({"messages": [USER] * 5_000}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "messages of text": ({"messages": ["a"]}, "messages[0]"),
    "a role that there is not": ({"messages": [{"role": "wizard", "content": "a"}]}, None),
    "a role of another type": ({"messages": [{"role": 1, "content": "a"}]}, None),
    "a token beyond the vocabulary": ({"logit_bias": {"999999": 1}}, None),
    "a bias of another type": ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
    "a bias that is infinite": ({"logit_bias": {"1": 1e999}}, None),
    "no id": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "fewer than none": ({"max_tokens": -1}, "max_tokens"),
    "too many tokens": ({"max_tokens": 10**30}, "max_tokens"),
    "two limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "stream as text": ({"stream": "true"}, "stream"),
    "stream as a number": ({"stream": 1}, "stream"),
    "a model that is elsewhere": ({"model": "gpt-4o"}, "model"),
    "a model's name of control characters": ({"model": "\0\n\x7f"}, "model"),
    "a temperature": ({"temperature": 1e999}, "temperature"),
    "a temperature of text": ({"temperature": "1"}, "temperature"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    "a priority": ({"priority": 10**30}, "priority"),
    "a seed of another type": ({"seed": "a"}, "seed"),
    "a schema that nests": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(400)}}},
        None,
    ),
    "an infinite number for the template": ({"chat_template_kwargs": {"a": 1e999}}, None),
    "template arguments that nest": ({"chat_template_kwargs": nested(400)}, None),
    "a tool that nests": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(400)}}]},
        None,
    ),
    "a text as large as a body": ({"messages": [{**USER, "content": "a " * 4_000_000}]}, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_member_that_cannot_be_obeyed_is_refused(port: int, name: str) -> None:
    members, param = BAD[name]
    found = chat(port, **members)
    assert found.status in (400, 404, 413), (found.status, found.body[:500])
    assert param is None or found.error["param"] == param, found.error


@pytest.mark.parametrize("target", [CHAT, TEXT, f"{CHAT}/render", f"{TEXT}/render", "/tokenize"])
def test_a_body_that_is_too_large_for_the_server_ends_nothing_else(port: int, target: str) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        body = json.dumps({"messages": [USER], "stream": True, "max_tokens": 100}).encode()
        head = (HERE, TYPE, "Connection: close", f"Content-Length: {len(body)}")
        sock.sendall(raw(*head, body=body))
        sock.recv(1)
        large = "a " * 1_500_000
        key = "messages" if CHAT in target else "prompt"
        found = post(
            port, {key: [{**USER, "content": large}] if CHAT in target else large}, target=target
        )
        rest = b"".join(iter(lambda: sock.recv(65536), b""))
    assert found.status in (400, 413)
    assert b"data: [DONE]" in rest
    assert b"event: error" not in rest


# ---- a search ------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "tool", "auto", "function", "text", "json_schema", "", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "role", "content", "text", "json_schema", "schema",
                 "arguments", "parameters", "id", "tool_calls", "tool_call_id", "json", "regex",
                 "include_usage", "1", "strict", "allowed_tools", "mode", "tools"]
            ) | st.text(max_size=3),
            inner, max_size=4,
        )
    ),
    max_leaves=8,
)  # fmt: skip
MEMBERS = st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON, max_size=4)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(members=MEMBERS, message=st.none() | JSON, is_chat=st.booleans())
def test_no_body_is_a_defect(
    port: int, members: dict[str, Any], message: Any, is_chat: bool
) -> None:
    if is_chat:
        body = {"messages": [USER if message is None else message], "max_tokens": 1, **members}
    else:
        body = {"prompt": "a" if message is None else message, "max_tokens": 1, **members}
    found = post(port, body, target=CHAT if is_chat else TEXT)
    assert found.status in (200, 400, 404, 413, 429), (body, found)


# ---- others beside it ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_leaves_the_door_and_its_neighbours_as_they_were(there: There, name: str) -> None:
    port = there.door.port
    neighbour = Neighbour(port, "neighbour")
    neighbour.start()
    try:
        answers: dict[str, int] = {}
        for _ in range(20):  # on a busy machine a second may pass without an answer
            if sum((answers := attacked(name, port, 1.0, "attacker")).values()):
                break
    finally:
        neighbour.close()
    assert sum(answers.values()) > 0
    assert "500" not in answers
    assert neighbour.answers > 0
    assert not neighbour.wrong
    assert chat(port).status == 200
    assert there.door.peak_bytes() <= DOOR_BYTES


def test_a_reader_who_stops_for_long_is_told_so(tmp_path: Path) -> None:
    held = ("--max-hold", "1", "--max-unread-tokens", "16")
    with real_server("--listen", "127.0.0.1:0", *held) as server:
        server.wait_until_ready()
        with open_door(server.addresses[0], tmp_path) as door, socket.socket() as sock:
            sock.settimeout(2 * PATIENCE_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", door.port))
            members = {"stream": True, "n": 16, "max_tokens": 400, "ignore_eos": True}
            logprobs = {"logprobs": True, "top_logprobs": 20}
            body = json.dumps({"messages": [USER], **members, **logprobs}).encode()
            head = (HERE, TYPE, "Connection: close", f"Content-Length: {len(body)}")
            sock.sendall(raw(*head, body=body))
            with headrace.Client(server.addresses[0]) as client:
                for is_there in (True, False):  # it begins, is held, and then ended
                    while bool(list(client.control.requests())) is not is_there:
                        time.sleep(0.01)
            found = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b'event: error\ndata: {"error":' in found
    assert b'"code":"results_not_read"' in found
    assert b"[DONE]" not in found


def test_a_token_counts_from_when_its_server_knows_it(tmp_path: Path) -> None:
    with (
        closing(Server(DEMO, tmp_path)) as server,
        open_door(server.target, tmp_path) as door,
    ):
        token = f"Authorization: Bearer {server.token(WITNESS)}"
        for known, status in (((OPERATOR,), 401), ((OPERATOR, WITNESS), 200)):
            server.grant(known)
            while chat_with(door.port, token).status != status:
                pass  # until it has read its file again
            assert get(door.port, HERE, token).status == status
        assert server.token(WITNESS) not in door.said() + server.log()
