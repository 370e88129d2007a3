"""Texts that are slow to process for a tokenizer, a detokenizer or a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.v1 import generation_pb2 as pb
from headrace.v1 import model_service_pb2 as model

from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile.inputs.kinds import OK, Call, Group, Round
from tests.campaign.hostile.sending import DETOKENIZE, GENERATE, TOKENIZE, Sender

RIVER = "Once upon a time there was a river. "


def _text(part: str, size: int) -> str:
    """Repeat a text as often as fits in a number of bytes."""
    return wire.filled(part.encode(), size).decode()


def _tokenize(text: str, *, details: bool = False) -> bytes:
    return model.TokenizeRequest(text={"text": text}, token_details=details).SerializeToString()


def _repeated(text: str) -> Round:
    """Repeat a text to the longest accepted length and to both message sizes, for Tokenize and as
    prompts.
    """

    def texts(s: Sender) -> Iterator[Call]:
        for size in sorted({s.longest_text, *s.sizes}):
            body = _text(text, size)
            yield Call(TOKENIZE, _tokenize(body))
            yield Call(GENERATE, wire.request(body, stop={"max_tokens": 1}))

    return texts


TEXTS = Group("texts")


@TEXTS.repeats(3)
def gone_texts(s: Sender) -> Iterable[Call]:
    """Three of the largest texts at once, whose callers go at once."""
    text = _text(RIVER, s.longest_text)
    return [Call(TOKENIZE, _tokenize(text), gzip=False, patience_s=0.05)]


for name, meaning, text in (
    ("long-word", "one word of one letter, the largest", "a"),
    (
        "long-mixed-word",
        "one word of all letters, the largest",
        "thequickbrownfoxjumpsoverthelazydog",
    ),
    ("combining", "the largest text of combining marks", "a" + "\u0301\u0323\u0308" * 10),
    (
        "characters",
        "the largest text of characters of four bytes",
        "\U0001f469\u200d\U0001f680\U00020000\ufffd",
    ),
    ("blanks", "the largest text of blanks and line ends", " " * 50 + "\n\t"),
    (
        "special-tokens",
        "the largest text of names of special tokens",
        "<|bos|><|user|><|us<|eos|><s></s>",
    ),
):
    TEXTS.repeats(name=name, meaning=meaning)(_repeated(text))


@TEXTS.repeats(4)
def token_details(s: Sender) -> Iterable[Call]:
    """Tokenize with token_details of the longest text, four at once."""
    return [Call(TOKENIZE, _tokenize(_text("a1 b2.", s.longest_text), details=True))]


@TEXTS.repeats(4, answers=(OK,))
def detokenize(s: Sender) -> Iterable[Call]:
    """Detokenize of the longest lists of ids, four at once."""
    many = s.card.vocab_size
    ids = b"".join(wire.varint(7 + 37 * number % (many - 7)) for number in range(s.most_ids))
    for raw in (ids, b"\x05" * s.most_ids, b"\x05" * s.below, b"\x05" * s.above):
        yield Call(DETOKENIZE, wire.inside(model.DetokenizeRequest, "token_ids", raw))


TEXTS.repeats(64, name="tokenize-crowd", meaning="Tokenize of the largest text, 64 at once")(
    _repeated(RIVER)
)


@TEXTS.repeats(4, answers=(OK,))
def truncated(s: Sender) -> Iterable[Call]:
    """The largest text and a quarter of it, cut to one token, four at once."""
    for size in (s.longest_text // 4, s.longest_text):
        text = _text("Once upon a time, by a river. ", size)
        cut = {"max_prompt_tokens": 1}
        yield Call(GENERATE, wire.request(text, stop={"max_tokens": 1}, truncation=cut))


@TEXTS.repeats(4, answers=(OK,))
def chat_long_content(s: Sender) -> Iterable[Call]:
    """A chat of one long message, four at once."""
    content = " " * (s.longest_text // 2) + "a" * (s.longest_text // 3)
    chat = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": content}]}
    return [Call(TOKENIZE, model.TokenizeRequest(chat=chat).SerializeToString())]


@TEXTS.sends()
async def session_texts(s: Sender) -> None:
    """The largest text as 64 commands of one session."""
    command = wire.add(_text(RIVER, s.longest_text), stop={"max_tokens": 1})
    await s.session(command for _ in range(64))
