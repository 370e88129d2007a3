/**
 * A conversation with tools: the model's calls are run, and it is told what they returned, until it calls none.
 *
 * @module
 */
import { invalidArgument } from "./errors.js";
import type { FunctionTool, JsonObject, Message, ToolCall } from "./messages.js";
import type { GenerationOptions } from "./options.js";
import type { Result } from "./results.js";

/** A tool that this program runs. */
export interface RunnableTool extends FunctionTool {
  /**
   * Does what the model asks for. What it returns is told to the model: text as it is, else its JSON text. What it throws
   * is told as an error, and the model may try again.
   */
  readonly run: (args: JsonObject, call: ToolCall) => unknown;
}

/** What came of one call. */
export interface ToolAnswer {
  /** The call, its arguments as the model wrote them. */
  readonly call: ToolCall;
  /** What the model is told. */
  readonly content: string;
  /** Why no tool answered: it threw this, or there is none of this name, or the arguments are no JSON object. */
  readonly error: Error | undefined;
}

/** One reply of the model, and what came of its calls. */
export interface ToolTurn {
  /** The reply. */
  readonly result: Result;
  /** In the order of the calls; empty if they were not run. */
  readonly answers: readonly ToolAnswer[];
  /** The conversation so far, this turn included. */
  readonly messages: readonly Message[];
  /**
   * Why the run ends with this turn: `answered`, the reply calls no tool; `cut`, it was cut, and its calls, which may not
   * be whole, were not run; `max_turns`, it is the last one allowed, and its calls were not run. Undefined: it goes on.
   */
  readonly end: "answered" | "cut" | "max_turns" | undefined;
}

/** The options of a run of tools, and those of each of its requests. */
export interface ToolRunOptions extends Omit<GenerationOptions, "tools" | "requestId" | "n" | "rawText"> {
  /** How many replies the model may give; default 10. */
  readonly maxTurns?: number | undefined;
  /** Ends the run when it is aborted. */
  readonly signal?: AbortSignal | undefined;
}

/** Holds the conversation; `generate` gets one reply. */
export async function* runTools(
  generate: (messages: readonly Message[], options: GenerationOptions) => Promise<Result>,
  conversation: readonly Message[],
  tools: readonly RunnableTool[],
  given: ToolRunOptions,
): AsyncGenerator<ToolTurn, void, undefined> {
  const { maxTurns = 10, ...options } = given;
  if (!Number.isInteger(maxTurns) || maxTurns < 1) {
    throw invalidArgument("maxTurns", `is ${maxTurns}; it must be at least 1`);
  }
  const described = tools.map(({ run: _, ...tool }) => tool);
  let messages = [...conversation];
  for (let turn = 1; ; turn++) {
    const asked = turn === 1 ? options : { ...options, toolChoice: afterTheFirst(options.toolChoice) };
    const result = await generate(messages, { ...asked, ...(described.length > 0 ? { tools: described } : {}) });
    const isWhole = endedByItself(result);
    if (result.toolCalls.length === 0) {
      messages = [...messages, result.message];
      const isCut = !["stop", "tool_calls"].includes(result.finishReason);
      yield { result, answers: [], messages, end: isCut ? "cut" : "answered" };
      return;
    }
    if (!isWhole || turn === maxTurns) {
      yield { result, answers: [], messages, end: isWhole ? "max_turns" : "cut" };
      return;
    }
    const answers = await Promise.all(result.toolCalls.map((call) => answer(call, tools)));
    messages = [...messages, replyOf(result), ...answers.map(messageOf)];
    yield { result, answers, messages, end: undefined };
  }
}

/** Nothing cut the reply. One with "stop" has a call whose arguments are no JSON: the model is told. */
function endedByItself(result: Result): boolean {
  const { finishReason, stopString } = result;
  return finishReason === "tool_calls" || (finishReason === "stop" && stopString === undefined);
}

/** A call that is required is so once: then the model may answer. */
function afterTheFirst(choice: GenerationOptions["toolChoice"]): GenerationOptions["toolChoice"] {
  if (choice === "required") {
    return { mode: "auto" };
  }
  if (typeof choice !== "object" || choice.mode !== "required") {
    return choice;
  }
  return choice.toolNames?.length === 1 ? { mode: "auto" } : { ...choice, mode: "auto" };
}

async function answer(call: ToolCall, tools: readonly RunnableTool[]): Promise<ToolAnswer> {
  try {
    const tool = tools.find((one) => one.name === call.name);
    if (tool === undefined) {
      throw new Error(`there is no tool "${call.name}"; there are ${tools.map((one) => one.name).join(", ")}`);
    }
    const value: unknown = await tool.run(objectOf(call), call);
    const content = typeof value === "string" ? value : (JSON.stringify(value) ?? "null");
    return { call, content, error: undefined };
  } catch (cause) {
    const error = cause instanceof Error ? cause : new Error(String(cause), { cause });
    return { call, content: `error: ${error.message}`, error };
  }
}

function objectOf(call: ToolCall): JsonObject {
  const found = parsed(call.arguments);
  if (found === undefined) {
    throw new Error(`the arguments are no JSON object; they were ${call.arguments.slice(0, 1000)}`);
  }
  return found;
}

function parsed(text: string): JsonObject | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as JsonObject) : undefined;
  } catch {
    return undefined;
  }
}

/** The reply, as templates take it back: arguments that are no JSON object are quoted by the answer. */
function replyOf(result: Result): Message {
  const toolCalls = result.toolCalls.map((call) => (parsed(call.arguments) ? call : { ...call, arguments: "{}" }));
  return { ...result.message, toolCalls };
}

function messageOf({ call, content }: ToolAnswer): Message {
  return { role: "tool", toolCallId: call.id, name: call.name, content };
}
