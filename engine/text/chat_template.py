"""Converts a conversation to the text of a prompt, with the model's Jinja template.

    messages, tools ──▶ plain copies ──▶ the template ──▶ text ──▶ Tokenizer.encode
                        conversation.py  sandbox.py

The text is the same as that of transformers' `apply_chat_template` for the same template and
values. Templates are only read from the model's directory: a client sends values, never a template,
and no value may replace one that the server or the tokenizer sets. The length of the text and the
time to produce it are limited.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from engine.contract.errors import ConfigError, InvalidRequestError
from engine.text.conversation import (
    CALL_FORMS,
    CallForm,
    JsonObject,
    cut,
    in_parts,
    leave_open,
    message_for_template,
    plain,
)
from engine.text.sandbox import ChatEnvironment, RaisedByTemplateError
from engine.text.text_errors import ChatTemplateError, ChatTemplateUnavailableError

_LOG = logging.getLogger(__name__)

MAX_CHARACTERS = 16 * 1024 * 1024
"""The longest text that a template may produce."""
MAX_SECONDS = 10.0
"""The time limit of a template, in seconds, checked whenever the template writes something."""
MAX_ATTEMPT_SECONDS = 1.0
"""The time limit of `attempt`, in seconds."""
MAX_SOURCE_BYTES = 1024 * 1024
"""The largest file with a template."""
_OPTION = "chat_template"
_MAX_REASON = 500
"""The longest message of raise_exception that is passed on, in characters."""

_PROBE = "headrace_probe"
_SET_BY_SERVER = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "self",
        "loop",
        "caller",
    }
    | {f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
)


class ChatTemplate:
    """One template. It is thread-safe, and compiled when it is first used."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_characters: int = MAX_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Store a Jinja source, the special tokens and the clock that it may read, and the limits
        on its output.
        """
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        self._clock = clock
        self._max_characters = max_characters
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._template: Template | None = None

    @property
    def source(self) -> str:
        """The Jinja source."""
        return self._source

    def compile(self) -> Template:
        """Return the compiled template.

        Raises:
            ChatTemplateUnavailableError: the source is not valid.
        """
        with self._lock:
            if self._template is None:
                try:
                    self._template = ChatEnvironment(self._clock).from_string(self._source)
                except TemplateSyntaxError as error:
                    raise ChatTemplateUnavailableError(
                        f"the model's chat template has a syntax error in line {error.lineno}; "
                        "send text or token ids"
                    ) from error
                except Exception as error:
                    _LOG.warning("The chat template cannot be compiled", exc_info=True)
                    raise ChatTemplateUnavailableError(
                        "the model's chat template cannot be compiled; send text or token ids"
                    ) from error
            return self._template

    @cached_property
    def call_form(self) -> CallForm:
        """How the template takes messages with tool calls: the first variant with which it prints a
        call. If it prints none, the first with which it renders, otherwise the usual one.
        """
        renders: CallForm | None = None
        for form in CALL_FORMS:
            texts = self._with_calls(form)
            if any(_prints(text) for text in texts):
                return form
            if renders is None and any(text is not None for text in texts):
                renders = form
        return renders or CALL_FORMS[0]

    def _with_calls(self, form: CallForm) -> list[str | None]:
        arguments = JsonObject({_PROBE: "x"}, f'{{"{_PROBE}": "x"}}')
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "probe0000", "type": "function", "function": function}
        messages: list[dict[str, object]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "probe", "tool_call_id": "probe0000"},
        ]
        shown = [message_for_template(message, "messages", form) for message in messages]
        tool = {"type": "function", "function": {"name": "probe", "parameters": {}}}
        values = {"messages": shown, "add_generation_prompt": False}
        return [self.attempt({**values, "tools": tools}) for tools in (None, [tool])]

    @cached_property
    def reads_parts_alone(self) -> bool:
        """Whether the template prints a text only if it is a part of a message's content.

        Some templates of models that read images are written so.
        """
        texts = (self._with_content(one) for one in (_PROBE, [{"type": "text", "text": _PROBE}]))
        # A list that is printed as it is shows its texts in quotes.
        quoted = (f"'{_PROBE}'", f'"{_PROBE}"')
        plain_text, part = (
            text is not None and _PROBE in text and not any(one in text for one in quoted)
            for text in texts
        )
        return part and not plain_text

    def _with_content(self, content: object) -> str | None:
        messages = [{"role": "user", "content": content}]
        return self.attempt({"messages": messages, "tools": None, "add_generation_prompt": False})

    def attempt(self, values: Mapping[str, object]) -> str | None:
        """Return the text for these values, or None if the template fails or takes too long."""
        try:
            return self._make(values, MAX_ATTEMPT_SECONDS)
        except Exception:  # a stranger's code: anything may come out of it
            return None

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text for these values.

        Raises:
            ChatTemplateUnavailableError: the source is not valid.
            ChatTemplateError: the template refused the values, failed on them, or produced too
                much.
        """
        self.compile()
        try:
            return self._make(values)
        except ChatTemplateError:
            raise
        except RaisedByTemplateError as error:
            reason = str(error)[:_MAX_REASON]
            raise ChatTemplateError(f"the model's chat template refuses it: {reason}") from error
        except Exception as error:
            # A template is a stranger's code: anything may come out of it. What it was goes to the
            # log.
            _LOG.warning("The chat template failed", exc_info=True)
            raise ChatTemplateError(_describe(error)) from error

    def _make(self, values: Mapping[str, Any], max_seconds: float | None = None) -> str:
        parts = self.compile().generate({**self._special_tokens, **values})
        found: list[str] = []
        left = self._max_characters
        max_seconds = self._max_seconds if max_seconds is None else max_seconds
        deadline = time.monotonic() + max_seconds
        for part in parts:
            found.append(part)
            left -= len(part)
            if left < 0:
                raise ChatTemplateError(
                    f"the model's chat template made more than {self._max_characters} "
                    "characters of it"
                )
            if time.monotonic() > deadline:
                raise ChatTemplateError(
                    f"the model's chat template took longer than {max_seconds:g} s"
                )
        return "".join(found)


class ChatTemplates:
    """The templates of a model, by name."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Store the Jinja sources ("default", perhaps "tool_use"), the named special tokens, and
        the clock for templates that print the date.
        """
        self._templates = {
            name: ChatTemplate(source, special_tokens, clock=clock)
            for name, source in sources.items()
        }
        self._reserved = _SET_BY_SERVER | set(special_tokens) | set(ChatEnvironment().globals)

    @property
    def sources(self) -> Sequence[str]:
        """The Jinja sources."""
        return [template.source for template in self._templates.values()]

    @property
    def available(self) -> bool:
        """Whether there is a template for ordinary conversations."""
        return "default" in self._templates

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, object] | None = None,
    ) -> str:
        """Convert a conversation to text.

        Args:
            messages: {"role": ..., "content": ...} and any other members that the template reads.
                Members that are None are left out. At least one message. Nothing passed in is
                changed. Arguments of tool calls that are a JsonObject, and a content of None in a
                message with tool calls, are passed on in the variant that the template expects.
                Other values are passed on unchanged.
            tools: as templates expect them: {"type": "function", "function": {"name",
                "description", "parameters"}}. With tools, a template named "tool_use" is used if
                there is one.
            add_generation_prompt: whether the text ends with the opening of an assistant's message.
                The default is True, unless continue_final_message.
            continue_final_message: whether the text ends with the last message's content, left
                open.
            template_arguments: further values for the template, by name.

        Raises:
            ChatTemplateUnavailableError: there is no usable template.
            ChatTemplateError: the template refused the conversation, or failed on it.
            InvalidRequestError: an argument is wrong; the field is named.
        """
        if not messages:
            raise InvalidRequestError("messages", "is empty; at least one message is needed")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message",
                "excludes add_generation_prompt: a message is continued or a new one begun",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        template, values = self._values(messages, tools, add_generation_prompt)
        values = {**values, **self._arguments(template_arguments or {})}
        if not continue_final_message:
            return template.render(values)
        mark = f"HEADRACE{secrets.token_hex(12)} "
        ending = leave_open(values["messages"][-1], mark, template.source)
        return cut(template.render(values), mark, ending)

    def attempt(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
    ) -> str | None:
        """Return the text of a conversation, to find out what the model's template does. None if
        the template refuses the conversation or fails on it, or there is no template.
        """
        if not self.available:
            return None
        template, values = self._values(messages, tools, add_generation_prompt)
        return template.attempt(values)

    def _values(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
    ) -> tuple[ChatTemplate, dict[str, Any]]:
        """Return the template for a conversation, and its values."""
        template = self._choose(bool(tools))
        form = template.call_form if _have_calls(messages) else CALL_FORMS[0]
        copied = [
            message_for_template(message, f"messages[{index}]", form)
            for index, message in enumerate(messages)
        ]
        return template, {
            "documents": None,
            "messages": list(map(in_parts, copied)) if template.reads_parts_alone else copied,
            "tools": [plain(tool, "tools") for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _choose(self, with_tools: bool) -> ChatTemplate:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if (template := self._templates.get(name)) is not None:
                return template
        raise ChatTemplateUnavailableError(
            "the model's tokenizer has no chat template; "
            "send text or token ids, laid out as the model expects"
        )

    def _arguments(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        for name in arguments:
            if name in self._reserved:
                raise InvalidRequestError(
                    f"template_arguments.{name}", "is set by the server; choose another name"
                )
            if not name.isidentifier() or name.startswith("_"):
                raise InvalidRequestError(
                    "template_arguments",
                    "has a name that is not letters, digits and underscores, a letter first",
                )
        return {
            name: plain(value, f"template_arguments.{name}") for name, value in arguments.items()
        }


def read_chat_template(path: str) -> str:
    """Return the source of a chat template in a file.

    Raises:
        ConfigError: the file cannot be read, is too long, or is not a template.
    """
    try:
        with Path(path).open("rb") as file:
            read = file.read(MAX_SOURCE_BYTES + 1)
        if len(read) > MAX_SOURCE_BYTES:
            raise ConfigError(_OPTION, f"{path} has more than {MAX_SOURCE_BYTES} bytes")
        source = read.decode()
    except OSError as error:
        raise ConfigError(_OPTION, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(_OPTION, f"{path} is not UTF-8, at byte {error.start}") from error
    if not source:
        raise ConfigError(_OPTION, f"{path} is empty; leave the option out for the model's own")
    try:
        ChatTemplate(source).compile()
    except ChatTemplateUnavailableError as error:
        raise ConfigError(_OPTION, f"{path} is no chat template in Jinja: {error}") from error
    return source


def _have_calls(messages: Iterable[object]) -> bool:
    return any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages)


def _prints(text: str | None) -> bool:
    """Whether a text contains the probe's arguments as JSON, rather than as JSON within a
    string.
    """
    return (
        text is not None
        and _PROBE in text
        and not (f"'{_PROBE}'" in text or f'\\"{_PROBE}' in text)
    )


def _describe(error: Exception) -> str:
    """Return what a caller can do about a failure, without internals of the template."""
    if isinstance(error, UndefinedError):
        return (
            "the model's chat template reads a value that this conversation does not have; "
            "give each message a content, if only an empty one"
        )
    if isinstance(error, SecurityError):
        return "the model's chat template does what the sandbox does not allow"
    if isinstance(error, RecursionError):
        return "the model's chat template nests too deeply on this conversation"
    return (
        "the model's chat template fails on this conversation; "
        "check roles, their order, and tool calls"
    )
