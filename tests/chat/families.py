"""Chat templates in the form of model families, conversations for them, and transformers' own
prompts of these: what Headrace's prompts are compared with.

The templates have their families' ways: how tools, their calls and their results are laid out,
whether a call's arguments are read as a mapping or as text, what a message without content is, what
becomes of reasoning, which roles there are and in which order, whether the date is printed. Their
texts are their own. The tokenizer is the demo model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import transformers.utils.chat_template_utils as rendering
from transformers import PreTrainedTokenizerFast

from engine.text import ChatTemplates

TEMPLATES = Path(__file__).parent / "templates"
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
NOW = datetime(2031, 2, 3, 4, 5, 6)
"""What the clock says to templates that print the date."""
SPECIAL = ("<|eot_id|>", "<|eom_id|>")
MARKS = {
    "<｜calls｜>": "<｜tool▁calls▁begin｜>",
    "<｜/calls｜>": "<｜tool▁calls▁end｜>",
    "<｜call｜>": "<｜tool▁call▁begin｜>",
    "<｜/call｜>": "<｜tool▁call▁end｜>",
    "<｜sep｜>": "<｜tool▁sep｜>",
}
"""What stands in the templates here for DeepSeek's marks."""


@dataclass(frozen=True)
class Family:
    """How transformers has to be asked for a family's prompts.

    Attributes:
        arguments_as_text: calls' arguments are given as JSON text, which the template joins.
        content: None where the template fails on a call without content, or loses it, unless the
            content is null. transformers leaves it out, so its renderer is asked itself.
        refuses: the conversations that the template fails on, or refuses.
        empties: the conversations that transformers' renderer fails on because a call has no
            content; ours gives it an empty one.
        title: what docs/chat.md calls it.
        parser: the format of its replies; empty: they are text.
        calls: how many calls of a message the template shows.
        reasoning: whether it shows the reasoning of the last message, or where.
        put_back: whether it shows a reply as the model wrote it.
        ids: the ids that the model gives its calls.
    """

    arguments_as_text: bool = False
    content: str | None = "left out"
    refuses: frozenset[str] = field(default_factory=frozenset)
    empties: frozenset[str] = field(default_factory=frozenset)
    title: str = ""
    parser: str = ""
    calls: int = 100
    reasoning: Literal["yes", "no", "beside calls"] = "yes"
    put_back: bool = True
    ids: str = ""


FAMILIES: Mapping[str, Family] = {
    "command_a": Family(
        title="Command A, Command R7B", parser="command_a", reasoning="beside calls"
    ),
    "command_r": Family(
        refuses=frozenset({"call_without_tools", "developer", "parts"}),
        title="Command R, R+", parser="command_r", reasoning="no",
    ),
    "deepseek_r1": Family(
        arguments_as_text=True, content=None, refuses=frozenset({"parts"}),
        title="DeepSeek R1", parser="deepseek", put_back=False,
    ),
    "deepseek_v3_1": Family(
        arguments_as_text=True, content=None, refuses=frozenset({"parts"}),
        title="DeepSeek V3.1", parser="deepseek", reasoning="no",
    ),
    "gemma": Family(
        refuses=frozenset(
            {
                "system", "turns", "developer", "tools", "odd_tools", "call", "call_without_tools",
                "call_answered", "two_calls", "call_with_text", "reasoning_before_a_call",
                "no_thinking",
            }
        ),
        title="Gemma 2",
    ),
    "glm": Family(title="GLM 4.5", parser="glm"),
    "granite": Family(title="Granite 3", parser="granite", reasoning="no"),
    "harmony": Family(
        refuses=frozenset({"parts"}), title="gpt-oss", parser="harmony", calls=1
    ),
    "hermes": Family(
        refuses=frozenset({"parts"}),
        empties=frozenset({"call_without_tools"}),
        title="Hermes", parser="hermes", reasoning="no",
    ),
    "kimi_k2": Family(
        title="Kimi K2 Thinking", parser="kimi_k2", ids="functions.{name}:{index}"
    ),
    "lfm2": Family(title="LFM2.5", parser="lfm2"),
    "llama3_1": Family(
        refuses=frozenset({"two_calls"}),
        title="Llama 3.1", parser="llama3_json", calls=1, reasoning="no",
    ),
    "minimax": Family(title="MiniMax M2", parser="minimax"),
    "mistral_nemo": Family(
        refuses=frozenset({"call_without_tools", "developer", "parts"}),
        title="Mistral Nemo", parser="mistral", reasoning="no",
    ),
    "nemotron": Family(
        refuses=frozenset({"parts"}), title="Nemotron Nano 2", parser="nemotron", reasoning="no"
    ),
    "olmo": Family(
        refuses=frozenset({"parts"}), title="OLMo 3", parser="olmo3", reasoning="no"
    ),
    "phi4": Family(
        refuses=frozenset({"parts"}), title="Phi-4-mini", parser="phi4_mini", reasoning="no"
    ),
    "qwen2_5": Family(
        refuses=frozenset({"parts"}), title="Qwen 2.5", parser="hermes", reasoning="no"
    ),
    "qwen3": Family(title="Qwen 3", parser="hermes"),
    "qwen3_coder": Family(
        refuses=frozenset({"parts"}), title="Qwen 3 Coder", parser="qwen3_coder", reasoning="no"
    ),
    "apertus": Family(title="Apertus", parser="apertus"),
    "apriel": Family(title="Apriel 1.6", parser="apriel"),
    "deepseek_v3_2": Family(title="DeepSeek V3.2, V4", parser="dsml"),
    "functionary_v3_1": Family(
        arguments_as_text=True, title="Functionary 3.1", parser="functionary", reasoning="no"
    ),
    "functionary_v3_2": Family(
        arguments_as_text=True, title="Functionary 3.2", parser="functionary_v3_2", reasoning="no"
    ),
    "gemma4": Family(title="Gemma 4", parser="gemma4", reasoning="no"),
    "gigachat3": Family(title="GigaChat 3", parser="gigachat3", calls=1, reasoning="no"),
    "hy3": Family(title="Hy3", parser="hy3"),
    "kimi_k3": Family(title="Kimi K3", parser="kimi_k3"),
    "llama4": Family(title="Llama 4, with Python's calls", parser="llama_python", reasoning="no"),
    "minimax_m1": Family(title="MiniMax M1", parser="minimax_m1"),
    "minimax_m3": Family(title="MiniMax M3", parser="minimax_m3"),
    "seed_oss": Family(title="Seed-OSS", parser="seed_oss"),
    "smollm3": Family(title="SmolLM3", parser="", reasoning="no"),
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """A conversation as transformers takes it: arguments of calls as mappings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, bool] = field(default_factory=dict)


def _user(text: str = "How is the river at Köln, 水位?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(name: str, arguments: dict[str, Any], call_id: str = "abcDE1234") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _calls(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def _result(text: str, call_id: str = "abcDE1234") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


SYSTEM = {"role": "system", "content": "  Answer in one word — höflich. "}
GAUGE = {
    "type": "function",
    "function": {
        "name": "read_gauge",
        "description": "Read a <gauge> & say its 'level'",
        "parameters": {
            "type": "object",
            "required": ["größe", "at"],
            "properties": {
                "zulu": {"type": "integer", "description": "The last first", "default": 2**64 + 1},
                "größe": {"type": "string", "enum": ["m", "cm"], "description": "Einheit"},
                "at": {"type": "array", "items": {"type": "number"}, "description": "Where"},
                "水": {"type": "object", "properties": {"z": {"type": "boolean"}, "a": {}}},
            },
            "additionalProperties": False,
        },
    },
}
BARE = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "Tell the time",
        "parameters": {"type": "object", "properties": {}},
    },
}
ODD = {
    "type": "function",
    "function": {
        "parameters": GAUGE["function"]["parameters"],  # type: ignore[index]
        "strict": True,
        "name": "read_gauge",
        "description": "Members in another order",
    },
    "x-größe": [1, None, {"b": 0.1, "a": 1e22}],
}
NUMBERS = {
    "zulu": 2**53 + 1,
    "größe": "m\n\"q\" \\ é \u2028 </tool_call>",
    "at": [0.1, -0.0, 1e22, 12345678901234567890, -(2**70)],
    "水": {"z": True, "b": None, "a": {}},
}  # fmt: skip

CONVERSATIONS: Mapping[str, Conversation] = {
    "question": Conversation([_user()]),
    "system": Conversation([SYSTEM, _user()]),
    "turns": Conversation([SYSTEM, _user("a"), {"role": "assistant", "content": " b\n"}, _user()]),
    "developer": Conversation([{"role": "developer", "content": "Be brief."}, _user()]),
    "parts": Conversation(
        [{"role": "user", "content": [{"type": "text", "text": "one "},
                                      {"type": "text", "text": " zwei"}]}]
    ),
    "tools": Conversation([SYSTEM, _user()], [GAUGE, BARE]),
    "tools_without_system": Conversation([_user()], [GAUGE]),
    "odd_tools": Conversation([SYSTEM, _user()], [ODD, GAUGE]),
    "call": Conversation(
        [_user(), _calls(_call("read_gauge", NUMBERS)), _result('{"b": 1, "a": [2]}')], [GAUGE]
    ),
    "call_without_tools": Conversation(
        [_user(), _calls(_call("now", {})), _result("4 o'clock"), _user("And now?")]
    ),
    "call_answered": Conversation(
        [
            SYSTEM, _user(), _calls(_call("read_gauge", NUMBERS)), _result("3 m"),
            {"role": "assistant", "content": "Three."}, _user("More?"),
        ],
        [GAUGE, BARE],
    ),
    "two_calls": Conversation(
        [
            _user(),
            _calls(_call("read_gauge", NUMBERS), _call("now", {"z": 1, "a": 2}, "fghIJ5678")),
            _result("3 m"), _result("4 o'clock", "fghIJ5678"),
        ],
        [GAUGE, BARE],
    ),
    "call_with_text": Conversation(
        [_user(), {**_calls(_call("now", {"q": 2**63})), "content": "Let me see."}, _result("4")],
        [BARE],
    ),
    "reasoning": Conversation(
        [
            _user("a"),
            {"role": "assistant", "content": "b", "reasoning_content": "hm,\n\nwell"},
            _user(),
        ]
    ),
    "reasoning_before_a_call": Conversation(
        [_user(), _calls(_call("now", {"x": 1}), reasoning_content="I need it"), _result("4")],
        [BARE],
    ),
    "reasoning_in_content": Conversation(
        [_user("a"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, _user()]
    ),
    "no_thinking": Conversation(
        [SYSTEM, _user()], arguments={"enable_thinking": False, "thinking": False}
    ),
    "arguments": Conversation(
        [_user()],
        [GAUGE],
        {
            "thinking": True,
            "reasoning_effort": "hoch",
            "model_identity": "Ich bin 水",
            "date_string": "1 Jan 2000",
            "tools_in_user_message": False,
            "builtin_tools": ["search", "code_interpreter"],
            "controls": {"zulu": 2**60 + 1, "länge": 0.5, "a": None},
            "documents": [{"doc_id": 2**53 + 1, "text": "Ein Fluß"}],
            "größe": {"z": 1, "a": 2},
        },
    ),
    "no_opening": Conversation([_user()], options={"add_generation_prompt": False}),
    "left_open": Conversation(
        [_user(), {"role": "assistant", "content": "It is "}],
        options={"continue_final_message": True},
    ),
}  # fmt: skip


def make_directory(family: str, folder: Path) -> Path:
    """The demo model's tokenizer with a family's template, as a directory below `folder`."""
    made = folder / family
    made.mkdir(parents=True)
    shutil.copy(DEMO / "tokenizer.json", made)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    sources = {
        path.name.split(".")[1]: path.read_text(encoding="utf-8")
        for path in sorted(TEMPLATES.glob(f"{family}.*.jinja"))
    }
    if sources:
        config["chat_template"] = [{"name": n, "template": t} for n, t in sources.items()]
    else:
        shutil.copy(TEMPLATES / f"{family}.jinja", made / "chat_template.jinja")
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@cache
def _transformers_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)  # type: ignore[no-any-return]


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _Clock:
        return cls.fromtimestamp(NOW.timestamp(), tz)


def reference(directory: Path, conversation: Conversation) -> list[int] | None:
    """The token ids of transformers' apply_chat_template; None if the template fails."""
    family, tokenizer = FAMILIES[directory.name], _transformers_tokenizer(directory)
    options = {"add_generation_prompt": True, **conversation.options}
    if options.get("continue_final_message"):
        options["add_generation_prompt"] = False
    messages = [_shown(message, family) for message in conversation.messages]
    if conversation in [CONVERSATIONS[name] for name in family.empties]:
        messages = [{**m, "content": m["content"] or ""} for m in messages]
    with patch.object(rendering, "datetime", _Clock):
        try:
            if family.content is not None or None not in (m["content"] for m in messages):
                return list(
                    tokenizer.apply_chat_template(
                        messages,
                        tools=conversation.tools,
                        return_dict=False,
                        **options,
                        **conversation.arguments,
                    )
                )
            [text], _ = rendering.render_jinja_template(
                [messages],
                tools=conversation.tools,
                chat_template=tokenizer.get_chat_template(tools=conversation.tools),
                **options,
                **tokenizer.special_tokens_map,
                **conversation.arguments,
            )
        except Exception:  # whatever a template raises
            return None
    return list(tokenizer.encode(text, add_special_tokens=False))


def _shown(message: dict[str, Any], family: Family) -> dict[str, Any]:
    message = json.loads(json.dumps(message))
    if family.arguments_as_text:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def templates(family: str) -> ChatTemplates:
    sources = {
        path.name.split(".")[1] if path.name.count(".") > 1 else "default": _marked(path)
        for path in sorted(TEMPLATES.glob(f"{family}.*"))
    }
    return ChatTemplates(sources, {"bos_token": "<s>", "eos_token": "</s>"})


def _marked(path: Path) -> str:
    source = path.read_text("utf-8")
    for short, mark in MARKS.items():
        source = source.replace(short, mark)
    return source
