"""Converts a request's input (text, tokens or a conversation) to token ids, and truncates it.

Tokenization takes about a second per megabyte, so only short texts are tokenized on the event loop.
Longer texts go to `service.admission.text_pool`, which divides its time among the callers. A text
is refused before it is tokenized if it could not fit the model's context even with the longest
tokens of the vocabulary.

Tokenization also takes memory: about 100 bytes for each byte of the text, and as much for each
token. So all texts have a size limit derived from the model's context. If a text could have far
more tokens than the context, its tokens are first counted in chunks. Results are arrays of 4 bytes
per token, because a list takes ten times as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.v1 import generation_pb2

from engine.text import JsonObject, Tokenizer
from service.admission.accounts import Account
from service.admission.text_pool import SHORT_BYTES, TextPool
from service.convert.json_text import JsonReader
from service.convert.values import check_enum
from service.errors.call_errors import FieldError, UnsupportedFieldError
from service.replies import ToolTypes, tool_types

INLINE_CHARACTERS = 1024
"""Texts up to this length are tokenized immediately on the event loop, in about 1 ms at most."""
INLINE_IDS = 1024
"""Up to this many ids are converted to text immediately on the event loop."""
BYTES_OF_ID = 8
"""The number of bytes that an id counts as in the pool."""
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MIN_MOST_TEXT_BYTES = 128 << 10
"""The lowest limit on the bytes of UTF-8 in a text. The limit is TEXT_BYTES_OF_TOKEN for each token
of the model's context if that is higher.
"""
TEXT_BYTES_OF_TOKEN = 8
"""Text in most languages has 2 to 6 bytes per token."""
MIN_MOST_TEXT_TOKENS = 128 << 10
"""The lowest limit on the tokens in a text. The limit is twice the model's context if that is
higher: chunks have slightly more tokens together than the whole text, and a text that fits must not
be refused.
"""
_EXPECTED = "prediction.text"
_PART_CHARACTERS = 32 << 10

_ROLES = {
    generation_pb2.CHAT_ROLE_SYSTEM: "system",
    generation_pb2.CHAT_ROLE_USER: "user",
    generation_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    generation_pb2.CHAT_ROLE_TOOL: "tool",
    generation_pb2.CHAT_ROLE_DEVELOPER: "developer",
}
_Reader = Callable[[str, str], JsonObject]
"""Parses an object from JSON text. The second argument is the text's field."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An input as the model receives it.

    Attributes:
        ids: its token ids.
        types: the types of its tools' parameters.
        form: the structural tag for the reply, made from its tools; empty if there is none.
    """

    ids: Sequence[int]
    types: ToolTypes = field(default_factory=dict)
    form: str = ""


class InputEncoder:
    """Converts inputs to token ids, and token ids to text. Each method may raise the errors of
    `TextPool.run`.

    Attributes:
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        pool: TextPool,
        *,
        max_context_tokens: int,
        max_receive_bytes: int,
    ) -> None:
        """Make an encoder for one loaded model.

        Args:
            tokenizer: the model's tokenizer.
            pool: processes long texts.
            max_context_tokens: the model's context length, which limits all texts.
            max_receive_bytes: the largest accepted message; also the limit for texts that templates
                make.
        """
        self.tokenizer = tokenizer
        self._pool = pool
        self._longest = tokenizer.longest_token
        self._fitting = max_context_tokens * self._longest
        self._most = min(
            max_receive_bytes, max(MIN_MOST_TEXT_BYTES, TEXT_BYTES_OF_TOKEN * max_context_tokens)
        )
        self._most_tokens = max(MIN_MOST_TEXT_TOKENS, 2 * max_context_tokens)

    async def encode_text(
        self, account: Account, text: generation_pb2.TextInput, *, fits: bool = False
    ) -> Sequence[int]:
        """Return the token ids of a text.

        Args:
            account: the account that is charged for the work.
            text: the text to tokenize.
            fits: whether the whole text must fit the model's context. If it cannot, it is refused
                before it is tokenized.

        Raises:
            FieldError: the text is too long.
        """
        special = text.add_special_tokens if text.HasField("add_special_tokens") else True
        content = text.text
        size = self._check_length("text.text", content, fits=fits)
        if len(content) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(content, add_special_tokens=special)
        return await self._pool.run(
            account,
            size,
            lambda: self._encode("text.text", content, size, add_special_tokens=special),
        )

    async def encode_prediction(self, account: Account, text: str) -> Sequence[int]:
        """Return the token ids of a text that is expected as output.

        For the arguments and errors, see `encode_text`.
        """
        field = _EXPECTED
        size = self._check_length(field, text, fits=True)
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return await self._pool.run(
            account, size, lambda: self._encode(field, text, size, add_special_tokens=False)
        )

    async def encode_chat(
        self,
        account: Account,
        chat: generation_pb2.ChatInput,
        *,
        fits: bool = False,
        hold: Callable[[Sequence[Mapping[str, object]]], str] = lambda _: "",
    ) -> Rendered:
        """Return the token ids of a conversation, formatted by the tokenizer's template, and
        information about its tools. `hold`: makes the reply's structural tag from the tools, given
        as the template sees them. For the other arguments see `encode_text`.

        Raises:
            FieldError: a message, tool or argument is wrong, or the text is too long.
            ChatTemplateUnavailableError: the model has no template.
        """

        def render() -> tuple[str, int, Rendered]:
            read = JsonReader().object
            tools = [_tool(tool, index, read) for index, tool in enumerate(chat.tools)]
            text = self.tokenizer.apply_chat_template(
                _messages(chat, read),
                tools=tools or None,
                add_generation_prompt=(
                    chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
                ),
                continue_final_message=chat.continue_final_message,
                template_arguments=read(
                    chat.template_arguments_json, "chat.template_arguments_json"
                ),
            )
            size = self._check_length("chat.messages", text, fits=fits)
            ids = encode(text, size) if size <= SHORT_BYTES else ()
            return text, size, Rendered(ids, tool_types(tools), hold(tools))

        def encode(text: str, size: int) -> Sequence[int]:
            return self._encode("chat.messages", text, size, add_special_tokens=False)

        # A template is a program: it never runs on the event loop.
        text, size, rendered = await self._pool.run(account, chat.ByteSize(), render)
        if size <= SHORT_BYTES:
            return rendered
        # A short conversation may make a long text, which is queued with long ones.
        return replace(
            rendered, ids=await self._pool.run(account, size, lambda: encode(text, size))
        )

    async def decode(self, account: Account, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids. Their number must have been checked."""

        def decode() -> str:
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        if len(ids) <= INLINE_IDS:
            return decode()
        return await self._pool.run(account, BYTES_OF_ID * len(ids), decode)

    def _encode(
        self, field: str, text: str, size: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Return the token ids of a text of `size` bytes. Runs in a thread if the text is long."""
        if size > self._most_tokens:
            self._check_tokens(field, text)
        return array("I", self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_tokens(self, field: str, text: str) -> None:
        """Refuse a text that has too many tokens, without tokenizing all of it."""
        count = 0
        for start in range(0, len(text), _PART_CHARACTERS):
            count += self.tokenizer.count(text[start : start + _PART_CHARACTERS])
            if count > self._most_tokens:
                raise FieldError(
                    field,
                    f"comes to more than {self._most_tokens} tokens, which is the most that one "
                    "text may come to: shorten it",
                )

    def _check_length(self, field: str, text: str, *, fits: bool) -> int:
        """Check a text's length. Return its size in UTF-8.

        Raises:
            FieldError: the text is too long.
        """
        if fits and len(text) > self._fitting:
            raise FieldError(
                field,
                f"comes to {len(text)} characters; at most {self._fitting} can fit "
                f"(limits.max_context_tokens, each of at most {self._longest} characters): "
                + ("shorten it" if field == _EXPECTED else "shorten it, or set truncation"),
            )
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > self._most:
            raise FieldError(
                field,
                f"comes to {size} bytes; at most {self._most} of one text are tokenized: "
                "shorten it, or send it in parts",
            )
        return size


@dataclass(frozen=True, slots=True)
class Truncation:
    """How an input that is too long is truncated.

    Attributes:
        most: the number of tokens that are kept, or None for all.
        right: whether tokens are removed at the end. Otherwise they are removed at the beginning.
    """

    most: int | None
    right: bool

    @classmethod
    def of(cls, spec: generation_pb2.GenerationSpec) -> Truncation:
        """Return the truncation that a spec asks for.

        Raises:
            FieldError: it is out of bounds.
        """
        if not spec.HasField("truncation"):
            return cls(None, right=False)
        check_enum(generation_pb2.TruncationSide, spec.truncation.side, "truncation.side")
        if spec.truncation.max_prompt_tokens == 0:
            raise FieldError("truncation.max_prompt_tokens", "is 0; it must be 1 or more")
        return cls(
            spec.truncation.max_prompt_tokens,
            right=spec.truncation.side == generation_pb2.TRUNCATION_SIDE_RIGHT,
        )

    def kept(self, length: int) -> slice:
        """Return which of `length` tokens are kept."""
        if self.most is None or length <= self.most:
            return slice(0, length)
        return slice(0, self.most) if self.right else slice(length - self.most, length)


def _messages(chat: generation_pb2.ChatInput, read: _Reader) -> list[dict[str, object]]:
    if len(chat.messages) > MAX_MESSAGES:
        raise FieldError(
            "chat.messages",
            f"has {len(chat.messages)} messages; at most {MAX_MESSAGES} are allowed",
        )
    return [
        _message(message, f"chat.messages[{i}]", read) for i, message in enumerate(chat.messages)
    ]


def _message(message: generation_pb2.ChatMessage, field: str, read: _Reader) -> dict[str, object]:
    role = _ROLES.get(message.role)
    if role is None:
        raise FieldError(f"{field}.role", "is not set, or not a role; say who speaks")
    converted: dict[str, object] = {"role": role, "content": _content(message, field)}
    if message.name:
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{index}]", read)
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        if role != "tool":
            raise FieldError(
                f"{field}.tool_call_id", "is for messages of CHAT_ROLE_TOOL; leave it out here"
            )
        converted["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        converted["reasoning_content"] = message.reasoning_content
    return converted


def _content(message: generation_pb2.ChatMessage, field: str) -> object:
    kind = message.WhichOneof("content_kind")
    if kind is None:
        return None
    if kind == "content":
        return message.content
    parts = message.content_parts.parts
    if not 1 <= len(parts) <= MAX_CONTENT_PARTS:
        raise FieldError(
            f"{field}.content_parts.parts",
            f"has {len(parts)} parts; give between 1 and {MAX_CONTENT_PARTS}",
        )
    return [_part(part, f"{field}.content_parts.parts[{i}]") for i, part in enumerate(parts)]


def _part(part: generation_pb2.ContentPart, field: str) -> dict[str, str]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case None:
            raise FieldError(field, "is empty; set its text")
        case kind:
            raise UnsupportedFieldError(
                f"{field}.{kind}", "is of a kind that the served model does not read; send text"
            )


def _tool_call(call: generation_pb2.ToolCall, field: str, read: _Reader) -> dict[str, object]:
    if not call.name:
        raise FieldError(f"{field}.name", "is empty; name the tool")
    arguments = read(call.arguments_json, f"{field}.arguments_json")
    function = {"name": call.name, "arguments": arguments}
    made: dict[str, object] = {"id": call.id} if call.id else {}
    return {**made, "type": "function", "function": function}


def _tool(tool: generation_pb2.Tool, index: int, read: _Reader) -> dict[str, object]:
    field = f"chat.tools[{index}]"
    if tool.definition_json:
        if tool.name or tool.HasField("description") or tool.parameters_json:
            raise FieldError(
                f"{field}.definition_json", "is the whole tool: leave its other fields out"
            )
        return read(tool.definition_json, f"{field}.definition_json")
    if not tool.name:
        raise FieldError(f"{field}.name", "is empty; name the tool")
    function: dict[str, object] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = read(tool.parameters_json, f"{field}.parameters_json")
    return {"type": "function", "function": function}
