/**
 * A conversation's messages and tools as the contract has them, checked: a mistake names the member and what it may be.
 */

import { create } from "@bufbuild/protobuf";

import { invalidArgument } from "../errors.js";
import {
  type ChatMessage,
  ChatMessageSchema,
  ChatRole,
  type Tool as ToolMessage,
  ToolChoiceMode,
  ToolChoiceSchema,
  type ToolChoice as ToolChoiceMessage,
  ToolSchema,
} from "../gen/headrace/v1/generation_pb.js";
import type { Message, TextPart, Tool, ToolChoice, ToolChoiceName, ToolCall } from "../messages.js";

const ROLES: Record<Message["role"], ChatRole> = {
  system: ChatRole.SYSTEM,
  user: ChatRole.USER,
  assistant: ChatRole.ASSISTANT,
  tool: ChatRole.TOOL,
  developer: ChatRole.DEVELOPER,
};
const MODES: Record<ToolChoiceName, ToolChoiceMode> = {
  auto: ToolChoiceMode.AUTO,
  none: ToolChoiceMode.NONE,
  required: ToolChoiceMode.REQUIRED,
};
const MESSAGE_MEMBERS = new Set(["role", "content", "name", "toolCalls", "toolCallId", "reasoningContent"]);

/** The text itself, if it can be sent: lone surrogates have no UTF-8. */
export function wellFormed(text: unknown, field: string): string {
  if (typeof text !== "string") {
    throw invalidArgument(field, `is ${describe(text)}; text is needed`);
  }
  if (!text.isWellFormed()) {
    throw invalidArgument(field, "is not valid Unicode text: it has half of a surrogate pair");
  }
  return text;
}

/** A value of a message, for people. */
export function describe(value: unknown): string {
  return value === null
    ? "null"
    : Array.isArray(value)
      ? "an array"
      : typeof value === "object"
        ? "an object"
        : `${typeof value} ${String(value)}`;
}

/** JSON text as it is; an object as its text, its members in their order. */
export function jsonText(value: unknown, field: string): string {
  if (typeof value === "string") {
    return wellFormed(value, field);
  }
  let text: string | undefined;
  try {
    text = JSON.stringify(value);
  } catch (error) {
    throw invalidArgument(field, `is no JSON: ${String(error)}`);
  }
  if (typeof value !== "object" || value === null || text === undefined) {
    throw invalidArgument(field, `is ${describe(value)}; an object or its JSON text is needed`);
  }
  return text;
}

/** A message of a conversation. */
export function messageToProto(message: Message, index: number): ChatMessage {
  const field = `messages[${index}]`;
  if (typeof message !== "object" || message === null) {
    throw invalidArgument(field, `is ${describe(message)}; a message is needed`);
  }
  const unknown = Object.keys(message).filter((name) => !MESSAGE_MEMBERS.has(name));
  if (unknown.length > 0) {
    throw invalidArgument(
      field,
      `has unknown members ${unknown.join(", ")}; it has ${[...MESSAGE_MEMBERS].join(", ")}`,
    );
  }
  if (!Object.hasOwn(ROLES, message.role)) {
    throw invalidArgument(`${field}.role`, `${String(message.role)} is not one of ${Object.keys(ROLES).join(", ")}`);
  }
  const given: Partial<Record<string, unknown>> = { ...message };
  const calls = (given["toolCalls"] ?? []) as readonly ToolCall[];
  const made = create(ChatMessageSchema, {
    role: ROLES[message.role],
    name: wellFormed(given["name"] ?? "", `${field}.name`),
    toolCallId: wellFormed(given["toolCallId"] ?? "", `${field}.toolCallId`),
    reasoningContent: wellFormed(given["reasoningContent"] ?? "", `${field}.reasoningContent`),
    toolCalls: calls.map((call) => ({
      id: wellFormed(call.id, `${field}.toolCalls.id`),
      name: wellFormed(call.name, `${field}.toolCalls.name`),
      argumentsJson: jsonText(call.arguments, `${field}.toolCalls.arguments`),
    })),
  });
  const content = message.content;
  if (typeof content === "string") {
    made.contentKind = { case: "content", value: wellFormed(content, `${field}.content`) };
  } else if (Array.isArray(content)) {
    const parts = content.map((part: TextPart) => textPart(part, `${field}.content`));
    made.contentKind = { case: "contentParts", value: { $typeName: "headrace.v1.ContentParts", parts } };
  } else if (content !== null && content !== undefined) {
    throw invalidArgument(`${field}.content`, `is ${describe(content)}; text or parts are needed`);
  }
  return made;
}

function textPart(part: TextPart, field: string) {
  if (typeof part !== "object" || part === null || part.type !== "text") {
    throw invalidArgument(field, 'has a part that is not {type: "text", text: …}');
  }
  const value = wellFormed(part.text, field);
  return { $typeName: "headrace.v1.ContentPart" as const, part: { case: "text" as const, value } };
}

/** A tool of a conversation. */
export function toolToProto(tool: Tool): ToolMessage {
  if (typeof tool !== "object" || tool === null) {
    throw invalidArgument("tools", `has ${describe(tool)}; a tool is needed`);
  }
  if ("function" in tool) {
    return create(ToolSchema, { definitionJson: jsonText(tool, "tools") });
  }
  const unknown = Object.keys(tool).filter((name) => !["name", "description", "parameters"].includes(name));
  if (unknown.length > 0) {
    throw invalidArgument("tools", `a tool has unknown members ${unknown.join(", ")}`);
  }
  return create(ToolSchema, {
    name: wellFormed(tool.name, "tools.name"),
    ...(tool.description === undefined ? {} : { description: wellFormed(tool.description, "tools.description") }),
    parametersJson: tool.parameters === undefined ? "" : jsonText(tool.parameters, "tools.parameters"),
  });
}

/**
 * The choice of a request; undefined: nothing holds the model. "auto" (or no choice) is absent, unless something asks
 * to be held: a definition with `strict: true`, `parallelToolCalls`, or a `ToolChoice`.
 */
export function toolChoiceToProto(
  choice: ToolChoiceName | ToolChoice | undefined,
  tools: readonly Tool[],
  parallelCalls: boolean | undefined,
): ToolChoiceMessage | undefined {
  if (choice === undefined || choice === "auto") {
    if (parallelCalls === undefined && !tools.some(isStrict)) {
      return undefined;
    }
  }
  const { mode = "auto", toolNames = [] } = typeof choice === "object" ? choice : { mode: choice };
  if (!Object.hasOwn(MODES, mode)) {
    throw invalidArgument("toolChoice", `${String(mode)} is none of ${Object.keys(MODES).join(", ")}`);
  }
  return create(ToolChoiceSchema, {
    mode: MODES[mode],
    toolNames: toolNames.map((name) => wellFormed(name, "toolChoice.toolNames")),
    ...(parallelCalls === undefined ? {} : { parallelCalls }),
  });
}

function isStrict(tool: Tool): boolean {
  return "function" in tool && tool.function["strict"] === true;
}
