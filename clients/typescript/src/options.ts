/**
 * Options of a request, and how a prompt and its options become the contract's `GenerationSpec`.
 *
 * An option that is left out (or undefined) is absent from the message, and the server's documented default holds. The
 * server checks ranges; here a value is refused only if it cannot be put in the message at all.
 *
 * @module
 */
import { clone, create, isMessage } from "@bufbuild/protobuf";
import { type Duration, durationFromMs } from "@bufbuild/protobuf/wkt";

import { invalidArgument } from "./errors.js";
import {
  CacheOptionsSchema,
  ChatInputSchema,
  Delivery,
  type GenerationSpec,
  GenerationSpecSchema,
  OutputOptionsSchema,
  PredictionSchema,
  SamplingOptionsSchema,
  SchedulingOptionsSchema,
  StopOptionsSchema,
  StructuredOutputSchema,
  type StructuredOutput,
  TruncationOptionsSchema,
  TruncationSide,
} from "./gen/headrace/v1/generation_pb.js";
import {
  describe,
  jsonText,
  messageToProto,
  toolChoiceToProto,
  toolToProto,
  wellFormed,
} from "./internal/messages_to_proto.js";
import type { JsonObject, Message, Prompt, Tool, ToolChoice, ToolChoiceName } from "./messages.js";

/** How tokens are chosen. */
export interface SamplingParameters {
  /** Divides the logits; 0 is greedy. */
  temperature?: number | undefined;
  /** Keep the k most likely tokens; 0: all. */
  topK?: number | undefined;
  /** Keep the fewest tokens whose probabilities reach this sum. */
  topP?: number | undefined;
  /** Keep tokens at least this likely, relative to the most likely one. */
  minP?: number | undefined;
  /** Keep the tokens of most typical surprise, up to this sum of probability. */
  typicalP?: number | undefined;
  /** Weakens every token seen in the prompt or the output; 1: not. */
  repetitionPenalty?: number | undefined;
  /** Subtracted from the logit of every token seen in the output. */
  presencePenalty?: number | undefined;
  /** Subtracted from a token's logit for each time it was seen in the output. */
  frequencyPenalty?: number | undefined;
  /** No sequence of this many tokens occurs twice in prompt and output; 0: off. */
  noRepeatNgramSize?: number | undefined;
  /** Added to the logits of single tokens, by id. */
  logitBias?: Readonly<Record<number, number>> | undefined;
  /** If given, only these ids are generated (include an end-of-sequence id). */
  allowedTokenIds?: readonly number[] | undefined;
  /** These ids are never generated. */
  bannedTokenIds?: readonly number[] | undefined;
  /** Makes the draws repeatable; 0 to 2^63 - 1. */
  seed?: bigint | number | undefined;
}

/** When generation stops. */
export interface StopParameters {
  /** The most tokens to generate; 0 only processes the prompt. */
  maxTokens?: number | undefined;
  /** Until this many tokens nothing ends the output. */
  minTokens?: number | undefined;
  /** Strings that end the output where they first appear. */
  stop?: string | readonly string[] | undefined;
  /** Token ids that end the output. */
  stopTokenIds?: readonly number[] | undefined;
  /** Replaces the model's own end-of-sequence ids. */
  eosTokenIds?: readonly number[] | undefined;
  /** Whether end-of-sequence tokens are treated like any other. */
  ignoreEos?: boolean | undefined;
  /** Whether the text that ended the output is part of it; default no. */
  includeStop?: boolean | undefined;
  /** For a conversation: after so many tokens of reasoning it is ended; 0: at once. */
  maxReasoningTokens?: number | undefined;
}

/** What is sent back, and in which pieces. */
export interface OutputParameters {
  /** `final`: everything in one piece at the end. */
  delivery?: "stream" | "final" | undefined;
  /** A chunk is sent once it has this many tokens. */
  minTokensPerDelta?: number | undefined;
  /** Log-probabilities with this many candidates for each token; 0: the token's own only. */
  logprobs?: number | undefined;
  /** The same for the prompt's tokens, in `Result.prompt.tokens`. */
  promptLogprobs?: number | undefined;
  /** Ids that follow the candidates of every token, in this order. */
  logprobTokenIds?: readonly number[] | undefined;
  /** Whether the text starts with the prompt's. */
  echo?: boolean | undefined;
  /** Whether each token comes with its text and bytes. */
  tokenDetails?: boolean | undefined;
  /** Whether each token comes with its time. */
  recordTimestamps?: boolean | undefined;
  /** Whether special tokens are left out of the text; default yes. */
  skipSpecialTokens?: boolean | undefined;
  /** Whether text is left out, for callers that want token ids alone. */
  omitText?: boolean | undefined;
  /** For a conversation: reasoning and tool calls stay in the text, as the model wrote them. */
  rawText?: boolean | undefined;
}

/** A form that the output must have; at most one of them. */
export interface StructuredParameters {
  /** A JSON value that satisfies this schema: an object, or JSON text. */
  jsonSchema?: JsonObject | string | undefined;
  /** Any JSON object. */
  jsonObject?: boolean | undefined;
  /** Text that matches this regular expression as a whole. */
  regex?: string | undefined;
  /** A text of this grammar, in Lark syntax. */
  grammar?: string | undefined;
  /** One of these strings. */
  choices?: readonly string[] | undefined;
  /** Text of these parts: `{type: "structural_tag", format: …}`, or JSON text. */
  structuralTag?: JsonObject | string | undefined;
  /** For JSON: whether the model may write blanks and line ends as it likes; default: one line. */
  flexibleWhitespace?: boolean | undefined;
}

/** What belongs to a prompt of messages. */
export interface ChatParameters {
  /** The functions that the model may call. */
  tools?: readonly Tool[] | undefined;
  /** Which of the tools it may or must call. The model is held to it; not with `auto`, unless a tool is strict. */
  toolChoice?: ToolChoiceName | ToolChoice | undefined;
  /** Whether a reply may have several calls; if given, the model is held as by `toolChoice`. */
  parallelToolCalls?: boolean | undefined;
  /** Whether the prompt ends with the opening of an assistant's turn; default yes. */
  addGenerationPrompt?: boolean | undefined;
  /** Whether the last message is left open, to be continued by the model. */
  continueFinalMessage?: boolean | undefined;
  /** Additional named values for the chat template: an object, or JSON text. */
  templateArguments?: JsonObject | string | undefined;
}

/** The options of one request; each may be left out. */
export interface GenerationOptions
  extends SamplingParameters, StopParameters, OutputParameters, StructuredParameters, ChatParameters {
  /** Your id for the request, 1 to 128 of `[A-Za-z0-9._:/-]`; made for you if left out. */
  requestId?: string | undefined;
  /** How many independent continuations to make; default 1. */
  n?: number | undefined;
  /** The model that is meant, by its name or an alias; a server that has it not refuses. */
  model?: string | undefined;
  /** The name of an adapter (such as a LoRA) to apply. */
  adapter?: string | undefined;
  /** Labels for accounting: at most 16, in the server's logs and traces. */
  labels?: Readonly<Record<string, string>> | undefined;
  /** For a text prompt: whether the tokenizer adds its special tokens; default yes. */
  addSpecialTokens?: boolean | undefined;
  /** Requests of a higher number run first; -100 to 100, default 0. */
  priority?: number | undefined;
  /** Milliseconds that the request may take in the server; then it ends with `time_limit` and the output so far. */
  timeLimitMs?: number | undefined;
  /** Cached prefixes are shared only among requests with the same salt. */
  cacheSalt?: string | undefined;
  /** Neither use cached prefixes nor cache this request's. */
  bypassPrefixCache?: boolean | undefined;
  /** Cut a longer prompt to this many tokens. */
  truncatePromptTo?: number | undefined;
  /** Which end that cuts; default the left, the oldest tokens. */
  truncationSide?: "left" | "right" | undefined;
  /**
   * What the output is expected to be like, as text or token ids, such as a file that is to be edited. It changes no
   * token: where the server speculates and the output goes as expected, several tokens come at a time.
   */
  prediction?: string | readonly number[] | undefined;
}

type Kind = "uint32" | "int32" | "float" | "bool" | "text" | "ids" | "texts";
type Part = "sampling" | "stop" | "output" | "structuredOutput" | "scheduling" | "cache" | "truncation";

/** Options that are a field of a part of the request, and the field's name there if it is another one. */
const FIELDS: Readonly<Record<string, readonly [Part, Kind, string?]>> = {
  temperature: ["sampling", "float"],
  topK: ["sampling", "uint32"],
  topP: ["sampling", "float"],
  minP: ["sampling", "float"],
  typicalP: ["sampling", "float"],
  repetitionPenalty: ["sampling", "float"],
  presencePenalty: ["sampling", "float"],
  frequencyPenalty: ["sampling", "float"],
  noRepeatNgramSize: ["sampling", "uint32"],
  allowedTokenIds: ["sampling", "ids"],
  bannedTokenIds: ["sampling", "ids"],
  maxTokens: ["stop", "uint32"],
  minTokens: ["stop", "uint32"],
  stop: ["stop", "texts", "stopStrings"],
  stopTokenIds: ["stop", "ids"],
  eosTokenIds: ["stop", "ids"],
  ignoreEos: ["stop", "bool"],
  includeStop: ["stop", "bool"],
  maxReasoningTokens: ["stop", "uint32"],
  minTokensPerDelta: ["output", "uint32"],
  logprobs: ["output", "uint32"],
  promptLogprobs: ["output", "uint32"],
  logprobTokenIds: ["output", "ids"],
  echo: ["output", "bool"],
  tokenDetails: ["output", "bool"],
  recordTimestamps: ["output", "bool"],
  skipSpecialTokens: ["output", "bool"],
  omitText: ["output", "bool"],
  rawText: ["output", "bool"],
  flexibleWhitespace: ["structuredOutput", "bool"],
  priority: ["scheduling", "int32"],
  cacheSalt: ["cache", "text", "salt"],
  bypassPrefixCache: ["cache", "bool"],
  truncatePromptTo: ["truncation", "uint32", "maxPromptTokens"],
};
const SCHEMAS = {
  sampling: SamplingOptionsSchema,
  stop: StopOptionsSchema,
  output: OutputOptionsSchema,
  structuredOutput: StructuredOutputSchema,
  scheduling: SchedulingOptionsSchema,
  cache: CacheOptionsSchema,
  truncation: TruncationOptionsSchema,
} as const;
const CHAT_OPTIONS = [
  "tools",
  "toolChoice",
  "parallelToolCalls",
  "addGenerationPrompt",
  "continueFinalMessage",
  "templateArguments",
] as const;
const FORMATS = ["jsonSchema", "jsonObject", "regex", "grammar", "choices", "structuralTag"] as const;

type Setter = (spec: GenerationSpec, value: unknown, name: string) => void;

const SETTERS: Readonly<Record<string, Setter>> = {
  requestId: (spec, value, name) => (spec.requestId = wellFormed(value, name)),
  model: (spec, value, name) => (spec.model = wellFormed(value, name)),
  adapter: (spec, value, name) => (spec.adapter = wellFormed(value, name)),
  n: (spec, value, name) => (spec.n = uint32(value, name)),
  labels: (spec, value, name) => {
    spec.labels = Object.entries(record(value, name)).map(([key, one]) => ({
      $typeName: "headrace.v1.Label",
      name: wellFormed(key, name),
      value: wellFormed(one, `${name}.${key}`),
    }));
  },
  logitBias: (spec, value, name) => {
    const bias: Record<number, number> = {};
    for (const [id, one] of Object.entries(record(value, name))) {
      bias[uint32(Number(id), name)] = number(one, `${name}[${id}]`);
    }
    part(spec, "sampling")["logitBias"] = bias;
  },
  seed: (spec, value, name) => (part(spec, "sampling")["seed"] = int64(value, name)),
  delivery: (spec, value, name) => {
    part(spec, "output")["delivery"] = oneOf({ stream: Delivery.STREAM, final: Delivery.FINAL }, value, name);
  },
  truncationSide: (spec, value, name) => {
    const sides = { left: TruncationSide.LEFT, right: TruncationSide.RIGHT };
    part(spec, "truncation")["side"] = oneOf(sides, value, name);
  },
  prediction: (spec, value, name) => {
    const content =
      typeof value === "string"
        ? { case: "text" as const, value: wellFormed(value, name) }
        : { case: "tokens" as const, value: { ids: ids(value, name) } };
    spec.prediction = create(PredictionSchema, { content });
  },
  timeLimitMs: (spec, value, name) => (part(spec, "scheduling")["timeLimit"] = duration(value, name)),
  addSpecialTokens: (spec, value, name) => {
    if (spec.input.case !== "text") {
      throw invalidArgument(name, "belongs to a text prompt");
    }
    spec.input.value.addSpecialTokens = bool(value, name);
  },
};

const NAMES = new Set<string>([...Object.keys(FIELDS), ...Object.keys(SETTERS), ...CHAT_OPTIONS, ...FORMATS]);

/**
 * The contract's message for a prompt and its options.
 *
 * @throws InvalidArgumentError - there is no option of a given name, or a value cannot be put in the message.
 */
export function buildSpec(prompt: Prompt, options: GenerationOptions = {}): GenerationSpec {
  const given = Object.entries(options).filter(([, value]) => value !== undefined);
  const unknown = given.map(([name]) => name).filter((name) => !NAMES.has(name));
  if (unknown.length > 0) {
    throw invalidArgument(unknown[0] ?? "", "there is no such option of a request");
  }
  const spec = isMessage(prompt, GenerationSpecSchema)
    ? clone(GenerationSpecSchema, prompt)
    : create(GenerationSpecSchema, { input: inputFrom(prompt) });
  for (const [name, value] of given) {
    const field = FIELDS[name];
    if (field !== undefined) {
      const [where, kind, inner = name] = field;
      part(spec, where)[inner] = CHECKS[kind](name === "stop" && typeof value === "string" ? [value] : value, name);
    } else {
      SETTERS[name]?.(spec, value, name);
    }
  }
  setChat(spec, options);
  setFormat(spec, options);
  return spec;
}

/** The input of a request, or of what tokenizes one. */
export function inputFrom(prompt: Exclude<Prompt, GenerationSpec>): NonNullable<GenerationSpec["input"]> {
  if (typeof prompt === "string") {
    const text = wellFormed(prompt, "prompt");
    return { case: "text", value: { $typeName: "headrace.v1.TextInput", text } };
  }
  if (prompt instanceof Uint32Array) {
    return { case: "tokens", value: { $typeName: "headrace.v1.TokenInput", ids: [...prompt] } };
  }
  if (!Array.isArray(prompt)) {
    throw invalidArgument("prompt", `is ${describe(prompt)}; text, token ids or messages are needed`);
  }
  const items = prompt as readonly (number | Message)[];
  if (items.length === 0) {
    throw invalidArgument("prompt", "is empty");
  }
  if (typeof items[0] === "number") {
    const value = { $typeName: "headrace.v1.TokenInput" as const, ids: ids(items, "prompt") };
    return { case: "tokens", value };
  }
  const messages = (items as readonly Message[]).map(messageToProto);
  return { case: "chat", value: create(ChatInputSchema, { messages }) };
}

/** Milliseconds as a protobuf Duration. */
export function duration(value: unknown, name: string): Duration {
  const milliseconds = number(value, name);
  if (milliseconds < 0 || milliseconds > 315_576_000_000_000) {
    throw invalidArgument(name, `${milliseconds} is no length of time in milliseconds`);
  }
  return durationFromMs(Math.round(milliseconds));
}

/** How many choices a request has. */
export function choicesOf(spec: GenerationSpec): number {
  return spec.n ?? 1;
}

/** Sets the options of a conversation. */
export function setChat(spec: Pick<GenerationSpec, "input">, options: ChatParameters): void {
  const given = CHAT_OPTIONS.find((name) => options[name] !== undefined);
  if (given === undefined) {
    return;
  }
  if (spec.input.case !== "chat") {
    throw invalidArgument(given, "belongs to a prompt of messages");
  }
  const chat = spec.input.value;
  const { tools, addGenerationPrompt, continueFinalMessage, templateArguments } = options;
  if (tools !== undefined) {
    chat.tools = tools.map(toolToProto);
  }
  if (addGenerationPrompt !== undefined) {
    chat.addGenerationPrompt = bool(addGenerationPrompt, "addGenerationPrompt");
  }
  if (continueFinalMessage !== undefined) {
    chat.continueFinalMessage = bool(continueFinalMessage, "continueFinalMessage");
  }
  if (templateArguments !== undefined) {
    chat.templateArgumentsJson = jsonText(templateArguments, "templateArguments");
  }
  const choice = toolChoiceToProto(options.toolChoice, tools ?? [], options.parallelToolCalls);
  if (choice === undefined) {
    return;
  }
  if (options.toolChoice === undefined && chat.toolChoice !== undefined) {
    // of a raw spec
    if (choice.parallelCalls !== undefined) {
      chat.toolChoice.parallelCalls = choice.parallelCalls;
    }
  } else {
    chat.toolChoice = choice;
  }
}

function setFormat(spec: GenerationSpec, options: GenerationOptions): void {
  const given = FORMATS.filter((name) => options[name] !== undefined && options[name] !== false);
  const [name, other] = given;
  if (name === undefined) {
    return;
  }
  if (other !== undefined) {
    throw invalidArgument(other, `cannot be combined with ${name}`);
  }
  (part(spec, "structuredOutput") as unknown as StructuredOutput).format = formatFrom(name, options[name]);
}

function formatFrom(name: (typeof FORMATS)[number], value: unknown): StructuredOutput["format"] {
  switch (name) {
    case "jsonSchema":
    case "structuralTag":
      return { case: name, value: jsonText(value, name) };
    case "jsonObject":
      bool(value, name);
      return { case: name, value: { $typeName: "headrace.v1.JsonObjectFormat" } };
    case "regex":
    case "grammar":
      return { case: name, value: wellFormed(value, name) };
    case "choices":
      return { case: "choice", value: { $typeName: "headrace.v1.ChoiceFormat", choices: texts(value, name) } };
  }
}

/** A part of the request, made if it is not there. Its fields are those that FIELDS and SETTERS name. */
function part(spec: GenerationSpec, name: Part): Record<string, unknown> {
  const parts = spec as unknown as Record<Part, Record<string, unknown> | undefined>;
  return (parts[name] ??= create(SCHEMAS[name]) as unknown as Record<string, unknown>);
}

const CHECKS: Record<Kind, (value: unknown, name: string) => unknown> = {
  uint32,
  int32: (value, name) => integer(value, name, -(2 ** 31), 2 ** 31 - 1),
  float: number,
  bool,
  text: wellFormed,
  ids,
  texts,
};

function uint32(value: unknown, name: string): number {
  return integer(value, name, 0, 2 ** 32 - 1);
}

function integer(value: unknown, name: string, least: number, most: number): number {
  if (typeof value !== "number" || !Number.isInteger(value) || value < least || value > most) {
    throw invalidArgument(name, `is ${describe(value)}; a whole number from ${least} to ${most} is needed`);
  }
  return value;
}

function int64(value: unknown, name: string): bigint {
  const exact = typeof value === "number" && Number.isSafeInteger(value) ? BigInt(value) : value;
  if (typeof exact !== "bigint" || exact < -(2n ** 63n) || exact >= 2n ** 63n) {
    throw invalidArgument(name, `is ${describe(value)}; a bigint below 2^63, or a safe integer, is needed`);
  }
  return exact;
}

function number(value: unknown, name: string): number {
  if (typeof value !== "number" || !Number.isFinite(value) || Math.abs(value) > 3.4e38) {
    throw invalidArgument(name, `is ${describe(value)}; a number is needed`);
  }
  return value;
}

function bool(value: unknown, name: string): boolean {
  if (typeof value !== "boolean") {
    throw invalidArgument(name, `is ${describe(value)}; true or false is needed`);
  }
  return value;
}

function ids(value: unknown, name: string): number[] {
  if (!Array.isArray(value)) {
    throw invalidArgument(name, `is ${describe(value)}; an array of token ids is needed`);
  }
  return value.map((one) => uint32(one, name));
}

function texts(value: unknown, name: string): string[] {
  if (!Array.isArray(value)) {
    throw invalidArgument(name, `is ${describe(value)}; an array of strings is needed`);
  }
  return value.map((one) => wellFormed(one, name));
}

function record(value: unknown, name: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw invalidArgument(name, `is ${describe(value)}; an object is needed`);
  }
  return value as Record<string, unknown>;
}

function oneOf<T>(values: Readonly<Record<string, T>>, value: unknown, name: string): T {
  const found = typeof value === "string" && Object.hasOwn(values, value) ? values[value] : undefined;
  if (found === undefined) {
    throw invalidArgument(name, `${String(value)} is not one of ${Object.keys(values).join(", ")}`);
  }
  return found;
}
