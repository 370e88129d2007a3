"""What every client does with every server, as a program: run with the address of a server of the
demo model. `newer` beside it also sets what only a newer contract has (tests/service/revisions.py).
"""

from __future__ import annotations

import sys
from typing import Any

import headrace
import pytest
from headrace import Client, Message
from headrace.v1 import generation_pb2

PROMPT = "The river"


def check_basic_cases(address: str) -> None:
    """One of each: whole, streamed, on a session, kept, cancelled, tokenized, described."""
    with Client(address) as client:
        client.wait_until_ready()
        card = client.model()
        assert "chat" in card.capabilities.names
        whole = client.generate(PROMPT, max_tokens=8, temperature=0, logprobs=1)
        assert len(whole.token_ids) == 8
        with client.stream(PROMPT, max_tokens=8, temperature=0) as stream:
            assert "".join(chunk.text for chunk in stream) == whole.text
        with client.session(lease=5) as session:
            handles = [session.submit(PROMPT, max_tokens=8, temperature=0, n=2) for _ in range(4)]
            for handle in handles:
                assert [choice.text for choice in handle.result().choices] == [whole.text] * 2
            with pytest.raises(headrace.InvalidArgumentError) as caught:
                session.submit(PROMPT, temperature=-1).result()
            assert caught.value.fields[0].field == "add.spec.sampling.temperature"
        request_id = client.add_request(PROMPT, max_tokens=8, temperature=0).request_id
        assert client.get_result(request_id, timeout=60).text == whole.text
        assert client.cancel([request_id])[request_id] is headrace.CancelStatus.ALREADY_FINISHED
        messages = [Message.system("Be brief."), Message.user("What is a headrace?")]
        ids = client.tokenize(messages).token_ids
        assert client.generate(messages, max_tokens=1).usage.prompt_tokens == len(ids)
        assert client.detokenize(client.tokenize(PROMPT).token_ids) == PROMPT
        assert client.generate(PROMPT, choices=["yes", "no"]).text in ("yes", "no")
        assert client.control.statistics().engine.steps > 0


def check_newer_cases(address: str) -> None:
    """What a contract has that the server was not built with."""
    pb: Any = generation_pb2  # of which the types know nothing
    with Client(address) as client:
        hinted = pb.GenerationSpec(text={"text": PROMPT}, stop={"max_tokens": 2}, hint="x" * 99)
        assert len(client.generate(hinted).token_ids) == 2  # nobody depends on it
        for name, spec in (
            ("time_travel", pb.GenerationSpec(text={"text": PROMPT}, arrive_before=3)),
            ("holograms", pb.GenerationSpec(hologram=b"x")),
            (
                "oracles",
                pb.GenerationSpec(
                    chat={"messages": [{"role": pb.CHAT_ROLE_ORACLE, "content": "x"}]}
                ),
            ),
        ):
            calls = [
                lambda spec=spec: client.generate(spec),
                lambda spec=spec: client.add_request(spec),
                lambda spec=spec: client.stream(spec).result(),
                lambda spec=spec: _on_session(client, spec),
            ]
            for call in calls:
                with pytest.raises(headrace.NotSupportedError, match=repr(name)):
                    call()


def _on_session(client: Client, spec: Any) -> None:
    with client.session() as session:
        session.submit(spec).result()


if __name__ == "__main__":
    check_basic_cases(sys.argv[1])
    if "newer" in sys.argv[2:]:
        check_newer_cases(sys.argv[1])
