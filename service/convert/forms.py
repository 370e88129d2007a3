"""Constraints on a reply: a structured output, a choice of tools, a limit for its reasoning.

    spec ──▶ ReplyPlan ──▶ (the prompt is made, with the tools' grammar) ──▶ GrammarParams

If the model reasons, a constraint applies to the text after the reasoning. The end of the prompt
tells whether the reasoning has already begun. Constraints that cannot be enforced are refused here
by name. The engine checks schemas when it compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.v1 import generation_pb2

from engine.contract.sampling_params import (
    MAX_GRAMMAR_BYTES,
    GrammarKind,
    GrammarParams,
    ReasoningParams,
)
from service.convert.reply_texts import comes_apart
from service.convert.sampling import grammar_params
from service.convert.values import check_enum
from service.errors.call_errors import FieldError, UnsupportedFieldError
from service.replies import Context, ModelFormat, ToolMode, ToolSchema, fold

MAX_STRICT_TOOLS = 128
"""The most tools of a request whose calls must satisfy their schemas."""
_MAX_BLANKS = 16
"""The most whitespace characters allowed between reasoning and the text that follows it."""
_MODES = {
    generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: ToolMode.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_AUTO: ToolMode.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_NONE: ToolMode.NONE,
    generation_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolMode.REQUIRED,
}
_CHOICE = "chat.tool_choice"
_BOUND = "stop.max_reasoning_tokens"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A choice of tools.

    Attributes:
        mode: whether the reply calls tools.
        names: the tools that it may call; empty for all.
        parallel: whether it may have several calls.
        is_strict: whether arguments must satisfy the tools' schemas. Otherwise any object is valid.
        field: the field that asks for it.
    """

    mode: ToolMode
    names: frozenset[str] = frozenset()
    parallel: bool = True
    is_strict: bool = True
    field: str = _CHOICE


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """A spec's constraints on its reply, before the prompt is made.

    Attributes:
        model: how the model writes replies to conversations. None if that is unknown, or the input
            is not a conversation.
        parser: parses the reply. None if it is returned as the model writes it.
        output: the structured output, or None if none is requested.
        tools: the choice of tools, or None if the reply is not constrained to one.
        max_reasoning_tokens: the limit for reasoning, or None for no limit.
    """

    model: ModelFormat | None
    parser: ModelFormat | None
    output: GrammarParams | None
    tools: ToolPlan | None
    max_reasoning_tokens: int | None

    @property
    def calls(self) -> bool:
        """Whether text in the format of a tool call counts as one."""
        return self.output is None and (self.tools is None or self.tools.mode is not ToolMode.NONE)

    @property
    def shown(self) -> Mapping[int, str]:
        """The special tokens that must be passed to the parser of the reply."""
        if self.parser is None:
            return {}
        if self.calls:
            return self.parser.shown
        marks = self.parser.format.reasoning
        needed = (marks.opening, marks.closing, marks.then)
        return {
            id: text
            for id, text in self.parser.shown.items()
            if any(text in mark for mark in needed)
        }

    def tool_form(self, tools: Sequence[Mapping[str, object]]) -> str:
        """Return the structural tag for replies with these tools, given as templates see them;
        empty if the reply is not constrained. May take milliseconds.

        Raises:
            FieldError: a tool cannot be called, or a named tool does not exist.
        """
        if self.tools is None or self.model is None or self.model.call_form is None:
            return ""
        plan, form = self.tools, self.model.call_form
        chosen = [] if plan.mode is ToolMode.NONE else _tool_schemas(plan, tools)
        for tool in chosen:
            reply = self.model.format.begin(Context({tool.name: {}}))
            read = fold([*reply.push(form.written(tool.name)), *reply.finish()])
            if [call.name for call in read.calls] != [tool.name]:
                raise FieldError(
                    plan.field,
                    f"takes in the tool {_shown(tool.name)}, and a call of that name cannot be "
                    "written in the model's format; use letters, digits and underscores",
                )
        opening = self.model.format.reasoning.opening if self.model.reasons else ""
        text = form.structural_tag(plan.mode, chosen, parallel=plan.parallel, reasoning=opening)
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise FieldError(
                plan.field,
                f"comes to a form of {size} bytes, with the schemas of {len(chosen)} tools; at "
                f"most {MAX_GRAMMAR_BYTES} are compiled: name fewer tools "
                f"({_CHOICE}.tool_names), or make their schemas smaller",
            )
        return text

    def grammar(self, prompt_tail: str, tool_form: str) -> GrammarParams | None:
        """Return the grammar that constrains the reply, or None if it is unconstrained.

        Args:
            prompt_tail: the end of the prompt's text.
            tool_form: the result of `tool_form`; empty if no tools were given.
        """
        form = self.output
        if tool_form and self.tools is not None:
            asked = "grammar.tool_choice" if self.tools.is_strict else "grammar.free"
            form = GrammarParams(kind=GrammarKind.STRUCTURAL_TAG, text=tool_form, field=asked)
        model = self.model
        if model is None or not model.reasons:
            return form
        if self.output is not None and self.parser is None:
            return form  # the whole output has it, so that there is no reasoning
        if form is None and self.max_reasoning_tokens is None:
            return None
        reasoning = self._reasoning(model, prompt_tail)
        if form is None:
            return GrammarParams(kind=GrammarKind.FREE, reasoning=reasoning)
        if self.output is not None and model.call_form is not None and model.call_form.text:
            form = _after(model.call_form.text, form)
        return replace(form, reasoning=reasoning)

    def _reasoning(self, model: ModelFormat, prompt_tail: str) -> ReasoningParams:
        marks = model.format.reasoning
        is_open = model.format.opens_reasoning(prompt_tail)
        may_begin = not is_open and not model.format.closes_reasoning(prompt_tail)
        return ReasoningParams(
            opening=marks.opening if may_begin else "",
            closing=marks.closing,
            then=marks.then,
            is_open=is_open,
            max_tokens=self.max_reasoning_tokens,
            max_blanks=0 if marks.then else _MAX_BLANKS,
            forbidden=tuple(token for token in model.special if token not in marks.closing),
        )


def reply_plan(
    spec: generation_pb2.GenerationSpec, model: ModelFormat | None, lacking: Mapping[str, str]
) -> ReplyPlan:
    """Read a spec's constraints on its reply.

    Args:
        spec: the caller's spec.
        model: how the model writes, or None if that is unknown.
        lacking: why the model's replies cannot be constrained, by capability (`why_lacking`).

    Raises:
        FieldError: fields contradict each other, or a constraint is invalid.
        UnsupportedFieldError: the model's format is unknown, or lacks the feature.
    """
    output = None
    if spec.HasField("structured_output"):
        output = grammar_params(spec.structured_output)
    bound = None
    if spec.stop.HasField("max_reasoning_tokens"):
        bound = spec.stop.max_reasoning_tokens
        if not spec.HasField("chat"):
            raise FieldError(_BOUND, "is for conversations (chat); leave it out")
        if not _reasons(model):
            raise _unsupported(_BOUND, lacking["reasoning_budget"])
    tools = None
    if spec.chat.HasField("tool_choice"):
        tools = _tool_plan(spec, model, lacking)
    elif bound is not None and output is None and model is not None:
        tools = _bounded(spec, model)
    if not spec.HasField("chat"):
        model = None
    # A structured output leaves no room for calls.
    parser = model if comes_apart(spec) and (output is None or _reasons(model)) else None
    return ReplyPlan(model, parser, output, tools, bound)


def _reasons(model: ModelFormat | None) -> bool:
    return model is not None and model.reasons


def _unsupported(field: str, why: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(field, f"is not supported here: {why}; leave it out")


def _tool_plan(
    spec: generation_pb2.GenerationSpec, model: ModelFormat | None, lacking: Mapping[str, str]
) -> ToolPlan:
    choice = spec.chat.tool_choice
    check_enum(generation_pb2.ToolChoiceMode, choice.mode, f"{_CHOICE}.mode")
    mode = _MODES[choice.mode]
    if not spec.chat.tools:
        raise FieldError(
            _CHOICE, "is set, and chat.tools is empty; send the tools, or leave it out"
        )
    if spec.HasField("structured_output"):
        raise FieldError(_CHOICE, "and structured_output exclude each other; leave one of them out")
    form = None if model is None else model.call_form
    if model is None or form is None:
        raise _unsupported(_CHOICE, lacking["tool_choice"])
    if len(choice.tool_names) > MAX_STRICT_TOOLS:
        raise FieldError(
            f"{_CHOICE}.tool_names",
            f"has {len(choice.tool_names)} names; at most {MAX_STRICT_TOOLS} are allowed",
        )
    if mode is ToolMode.NONE and choice.tool_names:
        raise FieldError(f"{_CHOICE}.tool_names", "names tools, and the mode says none; clear it")
    has_several = form.separator is not None
    parallel = choice.parallel_calls if choice.HasField("parallel_calls") else has_several
    if parallel and not has_several:
        raise UnsupportedFieldError(
            f"{_CHOICE}.parallel_calls",
            f"is true, and a reply in the model's format ({model.format.name}) has one call at "
            "most; leave it out",
        )
    return ToolPlan(mode, frozenset(choice.tool_names), parallel)


def _bounded(spec: generation_pb2.GenerationSpec, model: ModelFormat) -> ToolPlan | None:
    """Return the tool choice for the message that follows limited reasoning, in a format in which
    any message may be reasoning: exactly one other message. None for other formats.
    """
    if not model.format.reasoning.then:
        return None
    mode = ToolMode.AUTO if spec.chat.tools else ToolMode.NONE
    return ToolPlan(mode, is_strict=False, field=_BOUND)


def _tool_schemas(plan: ToolPlan, tools: Sequence[Mapping[str, object]]) -> list[ToolSchema]:
    found: dict[str, ToolSchema] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise FieldError(
                f"chat.tools[{index}]", f"has no function with a name, which {plan.field} needs"
            )
        if plan.names and name not in plan.names:
            continue
        if name in found:
            raise FieldError(
                f"chat.tools[{index}]",
                f"is a second {_shown(name)}; with {plan.field}, give each tool a name of its own",
            )
        schema = _schema(function.get("parameters"), index) if plan.is_strict else _ANY
        found[name] = ToolSchema(name, schema)
    for name in plan.names:
        if name not in found:
            raise FieldError(
                f"{_CHOICE}.tool_names", f"has {_shown(name)}, which is none of chat.tools"
            )
    if len(found) > MAX_STRICT_TOOLS:
        raise FieldError(
            plan.field,
            f"holds {len(found)} tools; at most {MAX_STRICT_TOOLS} can be held: name those that "
            f"may be called ({_CHOICE}.tool_names)",
        )
    return list(found.values())


_ANY: dict[str, object] = {"type": "object"}


def _schema(parameters: object, index: int) -> dict[str, object]:
    """Return the schema of a tool's arguments, which are always an object."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise FieldError(f"chat.tools[{index}]", "has parameters that are no JSON Schema object")
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise FieldError(
            f"chat.tools[{index}]",
            'has parameters of another type than "object", which arguments always are',
        )
    return {**parameters, "type": "object"}


def _shown(name: str) -> str:
    return repr(name if len(name) <= 64 else f"{name[:61]}…")


def _after(text: str, form: GrammarParams) -> GrammarParams:
    """Return a grammar that matches a text of the model's format, followed by `form`."""
    before = json.dumps({"type": "const_string", "value": text})
    element = _element(form)
    tag = f'{{"type": "sequence", "elements": [{before}, {element}]}}'
    return replace(
        form,
        kind=GrammarKind.STRUCTURAL_TAG,
        text=f'{{"type": "structural_tag", "format": {tag}}}',
        choices=(),
        field=f"grammar.{form.kind.value}",
    )


def _element(form: GrammarParams) -> str:
    """Return a grammar as an element of a structural tag. JSON keeps its original text, so that no
    number changes.
    """
    match form.kind:
        case GrammarKind.REGEX:
            return json.dumps({"type": "regex", "pattern": form.text})
        case GrammarKind.LARK:
            return json.dumps({"type": "grammar", "grammar": form.text})
        case GrammarKind.CHOICE:
            words = " | ".join(map(json.dumps, form.choices))
            return json.dumps({"type": "grammar", "grammar": f"start: WORD\nWORD: {words}"})
        case GrammarKind.JSON_OBJECT:
            return json.dumps({"type": "json_schema", "json_schema": _ANY})
        case _:
            try:
                json.loads(form.text)
            except (ValueError, RecursionError) as error:
                raise FieldError(
                    f"structured_output.{form.kind.value}", f"is not valid JSON: {error}"
                ) from None
            if form.kind is GrammarKind.STRUCTURAL_TAG:
                return form.text
            return f'{{"type": "json_schema", "json_schema": {form.text}}}'
