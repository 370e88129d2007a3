"""--chat-template: a file in place of the model's own template."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contract.errors import ConfigError
from engine.text.chat_template import MAX_SOURCE_BYTES
from tests.service.fake_engine import byte_tokenizer
from tests.service.helpers import serving, spec
from tests.service.replies.templates import FUNCTION_TAG, HERMES

CHAT = {"messages": [{"role": 1, "content": "hi"}]}


async def test_it_lays_out_conversations_and_its_name_is_in_the_card(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ '<own>' ~ messages[0].content }}" + FUNCTION_TAG)
    tokenizer = byte_tokenizer(chat_template=HERMES)
    async with serving(tokenizer=tokenizer, chat_template=str(path)) as h:
        card = h.server.state.front.card
        await h.generate(spec(chat=CHAT))
        [request] = h.engine.submitted
    assert card.capabilities.input.chat_template == "own.jinja"
    assert card.capabilities.output.reply_parser == "functionary"
    assert card.capabilities.output.reply_parser_proof.startswith("reads back what the chat")
    assert tokenizer.decode(request.prompt).startswith("<own>hi")


async def test_without_it_the_card_names_no_file() -> None:
    async with serving(tokenizer=byte_tokenizer(chat_template=HERMES)) as h:
        capabilities = h.server.state.front.card.capabilities
    assert capabilities.input.chat_template == ""
    assert capabilities.output.reply_parser == "hermes"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"{% if %}", "is no chat template in Jinja: the model's chat template has a syntax error"),
        (b"\xff\xfe", "is not UTF-8, at byte 0"),
        (b"x" * (MAX_SOURCE_BYTES + 1), f"has more than {MAX_SOURCE_BYTES} bytes"),
        # A character that the bound divides is no fault of the file.
        (b"x" * MAX_SOURCE_BYTES + "ß".encode(), f"has more than {MAX_SOURCE_BYTES} bytes"),
        (b"", "is empty; leave the option out for the model's own"),
    ],
)
async def test_what_is_no_template_is_refused_before_the_model_is_loaded(
    tmp_path: Path, source: bytes | None, words: str
) -> None:
    path = tmp_path / "own.jinja"
    if source is not None:
        path.write_bytes(source)
    with pytest.raises(ConfigError, match=r"chat_template: .*own\.jinja") as error:
        async with serving(chat_template=str(path)):
            pass
    assert words in str(error.value)


async def test_it_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(HERMES)
    with pytest.raises(ConfigError, match=r"needs the model's tokenizer\.json"):
        async with serving(tokenizer=None, has_tokenizer=False, chat_template=str(path)):
            pass
