"""Texts that are slow to process for a tokenizer, a detokenizer or a chat template."""

from __future__ import annotations

from benchmarks.hostile import encoding as wire
from benchmarks.hostile.inputs.kinds import OK, Group, Input
from benchmarks.hostile.sending import GENERATION, MODEL, Sender

TOKENIZE = MODEL + "Tokenize"
DETOKENIZE = MODEL + "Detokenize"


def _tokenize(text: bytes | str, *, details: bool = False) -> bytes:
    return wire.field(1, wire.field(1, text)) + (wire.count(3, 1) if details else b"")


async def _texts(s: Sender, text: str, width: int = 2) -> None:
    """Repeat a text to the longest accepted length and to both message sizes, and send the results
    to Tokenize and as prompts.
    """
    part = text.encode()
    bodies = [wire.filled(part, size) for size in sorted({s.longest_text, *s.sizes})]

    async def one(_: int) -> None:
        for body in bodies:
            await s.call(TOKENIZE, _tokenize(body), gzip=True)
            await s.call(
                GENERATION + "Generate",
                wire.request(wire.text_input(body) + wire.max_tokens(1)),
                gzip=True,
            )

    await s.again(width, one)


async def gone_texts(s: Sender) -> None:
    """Send long texts from callers that give up immediately, three at a time."""
    text = wire.filled(b"Once upon a time there was a river. ", s.longest_text)

    async def one(_: int) -> None:
        await s.call(TOKENIZE, _tokenize(text), patience_s=0.05)

    await s.again(3, one)


async def long_word(s: Sender) -> None:
    """Send one endless word of a single letter, in which every pair can be merged."""
    await _texts(s, "a")


async def long_mixed_word(s: Sender) -> None:
    """Send one endless word of all letters."""
    await _texts(s, "thequickbrownfoxjumpsoverthelazydog")


async def combining(s: Sender) -> None:
    """Send long runs of combining marks."""
    await _texts(s, "a" + "\u0301\u0323\u0308" * 10)


async def characters(s: Sender) -> None:
    """Send four-byte characters that are in no vocabulary, and joiners."""
    await _texts(s, "\U0001f469\u200d\U0001f680\U00020000\ufffd")


async def blanks(s: Sender) -> None:
    """Send long runs of blanks, newlines and tabs, which cause look-ahead in pre-tokenizers."""
    await _texts(s, " " * 50 + "\n\t")


async def special_tokens(s: Sender) -> None:
    """Send names of special tokens and prefixes of such names."""
    await _texts(s, "<|bos|><|user|><|us<|eos|><s></s>")


async def token_details(s: Sender) -> None:
    """Ask for the text and bytes of each token of the longest text."""
    text = wire.filled(b"a1 b2.", s.longest_text)

    async def one(_: int) -> None:
        await s.call(TOKENIZE, _tokenize(text, details=True), gzip=True)

    await s.again(4, one)


async def detokenize(s: Sender) -> None:
    """Detokenize the longest accepted lists of ids."""
    many = s.card.vocabulary
    ids = b"".join(wire.varint(7 + 37 * number % (many - 7)) for number in range(s.most_ids))

    async def one(_: int) -> None:
        for raw in (ids, b"\x05" * s.most_ids, b"\x05" * s.below, b"\x05" * s.above):
            await s.call(DETOKENIZE, wire.field(1, raw), gzip=True)

    await s.again(4, one)


async def tokenize_crowd(s: Sender) -> None:
    """Tokenize the largest text continuously from 64 concurrent callers."""
    await _texts(s, "Once upon a time there was a river. ", width=64)


async def truncated(s: Sender) -> None:
    """Send the largest text, and a quarter of it, and ask for truncation to one token.

    The quarter stays within the number of tokens that the server counts.
    """
    cut = wire.max_tokens(1) + wire.field(11, wire.count(1, 1))
    messages = [
        wire.request(wire.text_input(wire.filled(b"Once upon a time, by a river. ", size)) + cut)
        for size in (s.longest_text // 4, s.longest_text)
    ]

    async def one(_: int) -> None:
        for raw in messages:
            await s.call(GENERATION + "Generate", raw, gzip=True)

    await s.again(4, one)


async def chat_long_content(s: Sender) -> None:
    """Send a chat with one long message that is mostly blanks, which the template trims."""
    chat = wire.message(b" " * (s.longest_text // 2) + b"a" * (s.longest_text // 3))

    async def one(_: int) -> None:
        await s.call(TOKENIZE, wire.field(2, chat), gzip=True)

    await s.again(4, one)


async def session_texts(s: Sender) -> None:
    """Send the largest text in one session command after another."""
    text = wire.filled(b"Once upon a time there was a river. ", s.longest_text)
    command = wire.add(wire.text_input(text) + wire.max_tokens(1))
    await s.session(command for _ in range(64))


TEXTS = Group(
    "texts",
    (
        Input(
            name="gone-texts",
            meaning="three of the largest texts at once, whose callers go at once",
            send=gone_texts,
            fields=("TextInput.text",),
        ),
        Input(
            name="long-word",
            meaning="one word of one letter, the largest",
            send=long_word,
            fields=("TextInput.text",),
        ),
        Input(
            name="long-mixed-word",
            meaning="one word of all letters, the largest",
            send=long_mixed_word,
            fields=("TextInput.text",),
        ),
        Input(
            name="combining",
            meaning="the largest text of combining marks",
            send=combining,
            fields=("TextInput.text",),
        ),
        Input(
            name="characters",
            meaning="the largest text of characters of four bytes",
            send=characters,
            fields=("TextInput.text",),
        ),
        Input(
            name="blanks",
            meaning="the largest text of blanks and line ends",
            send=blanks,
            fields=("TextInput.text",),
        ),
        Input(
            name="special-tokens",
            meaning="the largest text of names of special tokens",
            send=special_tokens,
            fields=("TextInput.text",),
        ),
        Input(
            name="token-details",
            meaning="Tokenize with token_details of the longest text, four at once",
            send=token_details,
            fields=("TokenizeRequest.token_details",),
        ),
        Input(
            name="detokenize",
            meaning="Detokenize of the longest lists of ids, four at once",
            send=detokenize,
            answers=(OK,),
            fields=("DetokenizeRequest.token_ids",),
        ),
        Input(
            name="tokenize-crowd",
            meaning="Tokenize of the largest text, 64 at once",
            send=tokenize_crowd,
            fields=("TextInput.text",),
        ),
        Input(
            name="truncated",
            meaning="the largest text and a quarter of it, cut to one token, four at once",
            send=truncated,
            answers=(OK,),
            fields=("TruncationOptions.max_prompt_tokens",),
        ),
        Input(
            name="chat-long-content",
            meaning="a chat of one long message, four at once",
            send=chat_long_content,
            answers=(OK,),
            fields=("ChatMessage.content",),
        ),
        Input(
            name="session-texts",
            meaning="the largest text as 64 commands of one session",
            send=session_texts,
            fields=("TextInput.text",),
        ),
    ),
)
