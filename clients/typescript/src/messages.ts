/**
 * The input of a request: messages of a conversation, tools, and the types of a prompt.
 *
 * @module
 */
import { create } from "@bufbuild/protobuf";

import { invalidArgument } from "./errors.js";
import {
  type ChatMessage,
  ChatMessageSchema,
  ChatRole,
  type GenerationSpec,
  type Tool as ToolMessage,
  ToolChoiceMode,
  ToolChoiceSchema,
  type ToolChoice as ToolChoiceMessage,
  ToolSchema,
} from "./gen/headrace/v1/generation_pb.js";

/** A value that JSON has. */
export type JsonValue = string | number | boolean | null | readonly JsonValue[] | JsonObject;

/** An object that JSON has. */
export interface JsonObject {
  /** A member that is undefined is left out. */
  readonly [member: string]: JsonValue | undefined;
}

/** A call of a tool that the assistant made. */
export interface ToolCall {
  /** Its id, repeated in the `toolCallId` of the message that answers it. */
  readonly id: string;
  /** The name of the tool. */
  readonly name: string;
  /** The arguments: the text of a JSON object, as the model wrote it. */
  readonly arguments: string;
}

/** A part of a message's content. */
export interface TextPart {
  /** What kind of part it is. */
  readonly type: "text";
  /** The text. */
  readonly text: string;
}

/** Text, or parts of it. */
export type Content = string | readonly TextPart[];

/** Instructions, by the operator of the conversation or its developer. */
export interface InstructionMessage {
  /** Who speaks. */
  readonly role: "system" | "developer";
  /** What is said. */
  readonly content: Content;
  /** The speaker's name, for chat templates that use it. */
  readonly name?: string | undefined;
}

/** What the human, or the program that asks, says. */
export interface UserMessage {
  /** Who speaks. */
  readonly role: "user";
  /** What is said. */
  readonly content: Content;
  /** The speaker's name, for chat templates that use it. */
  readonly name?: string | undefined;
}

/** What the model said. */
export interface AssistantMessage {
  /** Who speaks. */
  readonly role: "assistant";
  /** What is said; null or absent beside tool calls. */
  readonly content?: Content | null | undefined;
  /** The speaker's name, for chat templates that use it. */
  readonly name?: string | undefined;
  /** The tools that it called. */
  readonly toolCalls?: readonly ToolCall[] | undefined;
  /** Its reasoning before `content`, for chat templates that replay it. */
  readonly reasoningContent?: string | undefined;
}

/** The result of a tool call. */
export interface ToolResultMessage {
  /** Who speaks. */
  readonly role: "tool";
  /** The result. */
  readonly content: Content;
  /** The id of the call that it answers. */
  readonly toolCallId: string;
  /** The tool's name, for chat templates that use it. */
  readonly name?: string | undefined;
}

/** One message of a conversation. */
export type Message = InstructionMessage | UserMessage | AssistantMessage | ToolResultMessage;

/** A function that the model may call. */
export interface FunctionTool {
  /** Its name. */
  readonly name: string;
  /** What it does, for the model to read. */
  readonly description?: string | undefined;
  /** Its parameters: a JSON Schema, or its text, which is sent as it stands. */
  readonly parameters?: JsonObject | string | undefined;
}

/** The whole tool as the chat template is to see it, in OpenAI's shape, its members in their order. */
export interface ToolDefinition {
  /** What kind of tool it is. */
  readonly type: "function";
  /** The function; `strict: true` holds the model to its schema. */
  readonly function: JsonObject & { readonly name: string };
}

/** A function that the model may call. */
export type Tool = FunctionTool | ToolDefinition;

/** Which tools a reply calls. The model is held to it, whatever the mode. */
export interface ToolChoice {
  /** Whether the reply calls tools: as the model likes (the default), not at all, or at least one. */
  readonly mode?: ToolChoiceName | undefined;
  /** Only these of the request's tools; empty: all of them. */
  readonly toolNames?: readonly string[] | undefined;
}

/** Whether a reply calls tools. */
export type ToolChoiceName = "auto" | "none" | "required";

/**
 * A prompt: text, token ids, a conversation, or the whole request as its message of the contract, which is copied and
 * on which options are set.
 */
export type Prompt = string | readonly number[] | Uint32Array | readonly Message[] | GenerationSpec;

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
