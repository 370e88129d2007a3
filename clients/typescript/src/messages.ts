/**
 * The input of a request: messages of a conversation, tools, and the types of a prompt.
 *
 * @module
 */

import type { GenerationSpec } from "./gen/headrace/v1/generation_pb.js";

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
