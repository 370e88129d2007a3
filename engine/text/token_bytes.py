r"""Converts a token's name in the vocabulary to its bytes in the text.

A tokenizer's decoder is a chain of steps. For nearly all language models the text is simply the
concatenation of every token's bytes, read as UTF-8, apart from a blank at the very beginning:

    ByteLevel                                      "Ġhe", "llo"       →  b" he" b"llo"
    Replace ▁ → " ", ByteFallback, Fuse, Strip     "▁he", "<0xC3>"    →  b" he" b"\xc3"
    Metaspace                                      "▁he", "llo"       →  b" he" b"llo"

`read_decoder` recognises these chains (`concatenates`); for them, a table look-up and an
incremental UTF-8 decoder convert tokens to text. Any other chain (WordPiece, BPEDecoder, CTC, none,
or steps in another order) is left to the library's decoder. The bytes given here are then only an
approximation for showing single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """Return the printable character of every byte in byte-level vocabularies (GPT-2): character →
    byte.

    Bytes that are printable in Latin-1 stand for themselves; the others are assigned the code
    points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How the tokens of one tokenizer become bytes.

    Attributes:
        concatenates: whether decoding is exactly the concatenation of `piece`, with the two rules
            for the beginning.
        byte_level: names are written in the byte alphabet.
        byte_fallback: names like <0xAB> are single bytes.
        replacements: strings to be replaced in every name, in order.
        first_marker: a string that is dropped, not replaced, in the text's first token; empty if
            there is none.
        strip_blanks: the most blanks that are dropped at the text's beginning.
        continuation_prefix: the prefix of names of tokens that continue a word (WordPiece); others
            begin with a blank.
        joined_by_blanks: whether tokens are separated by blanks (a tokenizer without a decoder).
    """

    concatenates: bool
    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    first_marker: str = ""
    strip_blanks: int = 0
    continuation_prefix: str = ""
    joined_by_blanks: bool = False

    def piece(self, name: str) -> bytes:
        """Return the bytes of a token in the text, unless it is the first token."""
        if self.byte_level:
            # A name with one character outside the alphabet, such as an added token's, stands for
            # itself.
            try:
                return bytes([_BYTES[character] for character in name])
            except KeyError:
                return encode_utf8(name)
        if self.continuation_prefix:
            if name.startswith(self.continuation_prefix):
                return encode_utf8(name[len(self.continuation_prefix) :])
            return encode_utf8(" " + name)
        if self.joined_by_blanks:
            return encode_utf8(" " + name)
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.byte_fallback and (found := _BYTE_NAME.match(name)):
            return bytes([int(found[1], 16)])
        return encode_utf8(name)

    def first_piece(self, name: str) -> bytes:
        """Return the bytes of the text's first token, before `strip_blanks`."""
        return self.piece(name.replace(self.first_marker, "") if self.first_marker else name)


def read_decoder(config: Mapping[str, object] | None) -> PieceRules:
    """Return the rules of a decoder, given as in tokenizer.json; None if the tokenizer has no
    decoder.
    """
    if config is None:
        return PieceRules(concatenates=False, joined_by_blanks=True)
    steps = _flatten(config)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(concatenates=True, byte_level=True)
    rules = _concatenating(steps)
    if rules is not None:
        return rules
    return _approximate(steps)


def encode_utf8(text: str) -> bytes:
    """Encode as UTF-8. A lone surrogate, which no valid text has, becomes '?'."""
    return text.encode("utf-8", "replace")


def _flatten(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    if config.get("type") != "Sequence":
        return [config]
    inner = config.get("decoders")
    found: list[Mapping[str, object]] = []
    for step in inner if isinstance(inner, Sequence) else ():
        found += _flatten(step)
    return found


def _concatenating(steps: Sequence[Mapping[str, object]]) -> PieceRules | None:
    """Return the rules of a chain of Replace* or Metaspace, then ByteFallback?, Fuse?, Strip?; None
    for any other chain.
    """
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    first_marker = ""
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        pattern, content = step.get("pattern"), step.get("content")
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        if not (isinstance(old, str) and old and isinstance(content, str)):
            return None
        replacements.append((old, content))
    if not replacements and rest and rest[0].get("type") == "Metaspace":
        step = rest.pop(0)
        marker = step.get("replacement")
        if not (isinstance(marker, str) and marker):
            return None
        replacements.append((marker, " "))
        first_marker = "" if step.get("prepend_scheme") == "never" else marker
    byte_fallback = bool(rest) and rest[0].get("type") == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    strip = 0
    if rest and rest[0].get("type") == "Fuse":
        rest.pop(0)
        if rest and rest[0].get("type") == "Strip":
            step = rest.pop(0)
            start = step.get("start")
            if step.get("content") != " " or step.get("stop") != 0 or not isinstance(start, int):
                return None
            strip = start
    if rest or not (replacements or byte_fallback):
        return None
    return PieceRules(
        concatenates=True,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        first_marker=first_marker,
        strip_blanks=strip,
    )


def _approximate(steps: Sequence[Mapping[str, object]]) -> PieceRules:
    """Return approximate rules for single tokens, for decoders that do more than concatenate."""
    replacements: list[tuple[str, str]] = []
    prefix = ""
    for step in steps:
        match step.get("type"), step:
            case "WordPiece", {"prefix": str(prefix)}:
                pass
            case "BPEDecoder", {"suffix": str(suffix)} if suffix:
                replacements.append((suffix, " "))
            case "Metaspace", {"replacement": str(marker)} if marker:
                replacements.append((marker, " "))
            case "Replace", {"pattern": {"String": str(old)}, "content": str(new)} if old:
                replacements.append((old, new))
            case _:
                pass
    return PieceRules(
        concatenates=False,
        byte_level=any(step.get("type") == "ByteLevel" for step in steps),
        byte_fallback=any(step.get("type") == "ByteFallback" for step in steps),
        replacements=tuple(replacements),
        continuation_prefix=prefix,
    )
