/**
 * The output of a request: pieces while it runs (`Chunk`), and the whole (`Result`).
 *
 * @module
 */
import { type Duration, durationMs, timestampDate } from "@bufbuild/protobuf/wkt";

import type {
  Accepted as AcceptedMessage,
  Delta,
  Finished,
  PromptProcessed,
  SamplingOptions,
  StopOptions,
  Timings as TimingsMessage,
  TokenInfo as TokenInfoMessage,
  Usage as UsageMessage,
} from "./gen/headrace/v1/generation_pb.js";
import { FinishReason as FinishReasonNumber } from "./gen/headrace/v1/generation_pb.js";
import type { GenerateResponse } from "./gen/headrace/v1/generation_service_pb.js";
import type { AssistantMessage, ToolCall } from "./messages.js";

/**
 * Why a request ended.
 *
 * - `stop`: a stop string, a stop id or an end-of-sequence token.
 * - `length`: `maxTokens` was reached.
 * - `context`: the context is full.
 * - `cancelled`: it was cancelled.
 * - `time_limit`: its time limit was reached.
 * - `tool_calls`: the model called tools, whose arguments are whole, and ended its turn.
 * - `unknown`: it has not ended, or for a reason that this version of the client does not know.
 */
export type FinishReason = "stop" | "length" | "context" | "cancelled" | "time_limit" | "tool_calls" | "unknown";

/** A token that could have been chosen. */
export interface TokenCandidate {
  /** Its id. */
  readonly id: number;
  /** Its own text. */
  readonly text: string;
  /** Its own bytes. */
  readonly bytes: Uint8Array;
  /** The natural logarithm of its probability. */
  readonly logprob: number;
}

/** One token with its details. */
export interface TokenInfo {
  /** Its id. */
  readonly id: number;
  /** Its own text; a part of a character shows as U+FFFD. Do not join these. */
  readonly text: string;
  /** Its own bytes, which may be a part of a character. */
  readonly bytes: Uint8Array;
  /** The natural logarithm of its probability, if requested. */
  readonly logprob: number | undefined;
  /** Its rank among all tokens by probability; 1 is the most likely. */
  readonly rank: number | undefined;
  /** The most likely tokens at this position; then those of `logprobTokenIds`. */
  readonly candidates: readonly TokenCandidate[];
  /** Milliseconds from the request's acceptance to this token, with `recordTimestamps`. */
  readonly elapsedMs: number | undefined;
}

/** The cost of a request, in tokens. */
export interface Usage {
  /** The prompt's tokens. */
  readonly promptTokens: number;
  /** How many of them were found in the prefix cache. */
  readonly cachedTokens: number;
  /** The tokens that were generated and delivered. */
  readonly completionTokens: number;
  /** How many of these were reasoning, where that comes apart from the text. */
  readonly reasoningTokens: number;
  /** The tokens that were guessed and computed, wrong ones included. */
  readonly draftTokens: number;
  /** How many of these were right, and needed no step of their own. */
  readonly acceptedDraftTokens: number;
  /** How many of draftTokens were guessed from the request's prediction. */
  readonly predictionDraftTokens: number;
  /** How many of these were right. */
  readonly acceptedPredictionDraftTokens: number;
}

/** How much a server had to do at a moment. */
export interface ServerLoad {
  /** Choices in its batch. */
  readonly running: number;
  /** Requests that waited. */
  readonly waiting: number;
  /** How much of the KV cache requests held, from 0 to 1. */
  readonly kvCacheUsage: number;
}

/** Times of a request, in milliseconds since it was accepted; undefined if the event did not happen. */
export interface Timings {
  /** Until it was first scheduled. */
  readonly firstScheduledMs: number | undefined;
  /** Until its first token. */
  readonly firstTokenMs: number | undefined;
  /** Until its last token. */
  readonly lastTokenMs: number | undefined;
  /** Until its end. */
  readonly finishedMs: number | undefined;
  /** How often it was preempted: gave up its cache blocks to others. */
  readonly preemptions: number;
}

/** The acceptance of a request: its parameters in force. */
export interface Accepted {
  /** The request. */
  readonly requestId: string;
  /** The prompt's length in tokens, after truncation. */
  readonly promptTokens: number;
  /** How many requests were waiting before it. */
  readonly queuePosition: number;
  /** The seed in force, set by the caller or drawn by the server: 0 to 2^63 - 1. */
  readonly seed: bigint | undefined;
  /** When it was accepted, by the server's clock. */
  readonly acceptedAt: Date | undefined;
  /** The parameters in force, with every default filled in. */
  readonly sampling: SamplingOptions | undefined;
  /** The limits in force, with every default filled in. */
  readonly stop: StopOptions | undefined;
  /** The digest of its adapter's content, in hexadecimal; empty if it has none. */
  readonly adapterDigest: string;
}

/** The result of processing the prompt. */
export interface PromptInfo {
  /** The prompt's length in tokens. */
  readonly promptTokens: number;
  /** How many of them were found in the prefix cache. */
  readonly cachedTokens: number;
  /** The prompt's tokens, if `promptLogprobs` was set; the first has no logprob. */
  readonly tokens: readonly TokenInfo[];
}

/** A part of a tool call. */
export interface ToolCallChunk {
  /** Which of the reply's calls. */
  readonly index: number;
  /** In the call's first part; else empty. */
  readonly id: string;
  /** The tool's, in the call's first part; else empty. */
  readonly name: string;
  /** The next part of the arguments; all parts, joined, are the text of a JSON object. */
  readonly arguments: string;
}

/**
 * New output of one choice. Texts and ids of all chunks, joined, are the exact output; in the reply to a conversation,
 * what the model thought and the tools that it calls come apart.
 */
export interface Chunk {
  /** The request. */
  readonly requestId: string;
  /** The new text. */
  readonly text: string;
  /** The new tokens' ids. */
  readonly tokenIds: readonly number[];
  /** The new tokens with their details, if they were requested. */
  readonly tokens: readonly TokenInfo[];
  /** Which of the request's choices. */
  readonly choiceIndex: number;
  /** How many tokens of this choice came before. */
  readonly tokenOffset: number;
  /** The event's number in its request. */
  readonly seq: bigint;
  /** New reasoning. */
  readonly reasoning: string;
  /** Tool calls that begin or go on. */
  readonly toolCalls: readonly ToolCallChunk[];
}

/** One whole output of a request, which has `n` of them. */
export interface Choice {
  /** Which of them. */
  readonly index: number;
  /** The text; empty if the model has no tokenizer: its output is `tokenIds` alone. */
  readonly text: string;
  /** The tokens' ids. */
  readonly tokenIds: readonly number[];
  /** The tokens with their details, if they were requested. */
  readonly tokens: readonly TokenInfo[];
  /** Why it ended. */
  readonly finishReason: FinishReason;
  /** The stop string that was found, if one was. */
  readonly stopString: string | undefined;
  /** The stop or end-of-sequence id that was generated, if one was. */
  readonly stopTokenId: number | undefined;
  /** Its cost. */
  readonly usage: Usage;
  /** How long it took. */
  readonly timings: Timings;
  /** What the model thought before it answered, where that comes apart from the text. */
  readonly reasoning: string;
  /** The tools that it called, their arguments as JSON text; not whole where it was cut. */
  readonly toolCalls: readonly ToolCall[];
}

/** The whole result of a request. The getters are those of the first choice. */
export class Result {
  /** Applications do not make these. */
  constructor(
    /** The request. */
    readonly requestId: string,
    /** The outputs, by index. */
    readonly choices: readonly Choice[],
    /** Its cost in tokens, all choices together. */
    readonly usage: Usage,
    /** The result of processing the prompt, if that was told. */
    readonly prompt: PromptInfo | undefined,
    /** Its parameters in force, if they were told. */
    readonly accepted: Accepted | undefined,
  ) {}

  /** The text of the first choice. */
  get text(): string {
    return this.#first.text;
  }

  /** The token ids of the first choice. */
  get tokenIds(): readonly number[] {
    return this.#first.tokenIds;
  }

  /** The first choice's tokens with their details, if they were requested. */
  get tokens(): readonly TokenInfo[] {
    return this.#first.tokens;
  }

  /** What the model thought before the first choice's text. */
  get reasoning(): string {
    return this.#first.reasoning;
  }

  /** The tools that the first choice calls. */
  get toolCalls(): readonly ToolCall[] {
    return this.#first.toolCalls;
  }

  /** Why the first choice ended. */
  get finishReason(): FinishReason {
    return this.#first.finishReason;
  }

  /** The stop string that ended the first choice, if one did. */
  get stopString(): string | undefined {
    return this.#first.stopString;
  }

  /** The token id that ended the first choice, if one did. */
  get stopTokenId(): number | undefined {
    return this.#first.stopTokenId;
  }

  /** How long the first choice took. */
  get timings(): Timings {
    return this.#first.timings;
  }

  /** The seed that was used, if it was told. */
  get seed(): bigint | undefined {
    return this.accepted?.seed;
  }

  /** The first choice as a message for the conversation's next turn. */
  get message(): AssistantMessage {
    const { text, reasoning, toolCalls } = this.#first;
    return {
      role: "assistant",
      content: toolCalls.length > 0 && text === "" ? null : text,
      ...(reasoning === "" ? {} : { reasoningContent: reasoning }),
      ...(toolCalls.length === 0 ? {} : { toolCalls }),
    };
  }

  get #first(): Choice {
    return this.choices[0] ?? choiceFrom(0, [], undefined);
  }
}

/** The tokens of a text or a conversation. */
export interface Tokenization {
  /** Their ids. */
  readonly tokenIds: readonly number[];
  /** The tokens with their text and bytes, if requested. */
  readonly tokens: readonly TokenInfo[];
}

const NONE: readonly never[] = [];

/** A token of an answer. */
export function tokenFrom(message: TokenInfoMessage): TokenInfo {
  const { id, text, bytes, logprob, rank, elapsedDuration } = message;
  const candidates = message.candidates.map((one) => ({
    id: one.id,
    text: one.text,
    bytes: one.bytes,
    logprob: one.logprob,
  }));
  return { id, text, bytes, logprob, rank, candidates, elapsedMs: milliseconds(elapsedDuration) };
}

/** The output of a delta. */
export function chunkFrom(requestId: string, seq: bigint, choiceIndex: number, offset: number, delta: Delta): Chunk {
  const tokens = delta.tokens.length > 0 ? delta.tokens.map(tokenFrom) : NONE;
  return {
    requestId,
    text: delta.text,
    tokenIds: tokens.length > 0 ? tokens.map((token) => token.id) : delta.tokenIds,
    tokens,
    choiceIndex,
    tokenOffset: offset,
    seq,
    reasoning: delta.reasoning,
    toolCalls: delta.toolCalls.length > 0 ? delta.toolCalls.map(callChunkFrom) : NONE,
  };
}

function callChunkFrom(part: Delta["toolCalls"][number]): ToolCallChunk {
  return { index: part.index, id: part.id, name: part.name, arguments: part.argumentsJson };
}

/** The acceptance of a request. */
export function acceptedFrom(requestId: string, message: AcceptedMessage): Accepted {
  return {
    requestId,
    promptTokens: message.promptTokens,
    queuePosition: message.queuePosition,
    seed: message.sampling?.seed,
    acceptedAt: message.acceptTime === undefined ? undefined : timestampDate(message.acceptTime),
    sampling: message.sampling,
    stop: message.stop,
    adapterDigest: message.adapterDigest,
  };
}

/** The result of processing the prompt. */
export function promptFrom(message: PromptProcessed): PromptInfo {
  const { promptTokens, cachedTokens, tokens } = message;
  return { promptTokens, cachedTokens, tokens: tokens.map(tokenFrom) };
}

/** One whole output, from its chunks in order, and how it ended. */
export function choiceFrom(index: number, chunks: readonly Chunk[], finished: Finished | undefined): Choice {
  return {
    index,
    text: chunks.map((chunk) => chunk.text).join(""),
    tokenIds: chunks.flatMap((chunk) => chunk.tokenIds),
    tokens: chunks.flatMap((chunk) => chunk.tokens),
    reasoning: chunks.map((chunk) => chunk.reasoning).join(""),
    toolCalls: joinedCalls(chunks.flatMap((chunk) => chunk.toolCalls)),
    ...endFrom(finished),
  };
}

function endFrom(finished: Finished | undefined) {
  const matched = finished?.matched;
  return {
    finishReason: finishReasonFrom(finished?.reason ?? FinishReasonNumber.UNSPECIFIED),
    stopString: matched?.case === "stopString" ? matched.value : undefined,
    stopTokenId: matched?.case === "stopTokenId" ? matched.value : undefined,
    usage: usageFrom(finished?.usage),
    timings: timingsFrom(finished?.timings),
  };
}

function joinedCalls(parts: readonly ToolCallChunk[]): ToolCall[] {
  const calls = new Map<number, { id: string; name: string; arguments: string }>();
  for (const { index, id, name, arguments: text } of parts) {
    const call = calls.get(index);
    if (call === undefined) {
      calls.set(index, { id, name, arguments: text });
    } else {
      call.arguments += text;
    }
  }
  return [...calls.values()];
}

/** The answer of the unary `Generate`. */
export function resultFrom(message: GenerateResponse): Result {
  const choices = message.choices.map((choice): Choice => ({
    index: choice.index,
    text: choice.text,
    tokenIds: choice.tokenIds,
    tokens: choice.tokens.map(tokenFrom),
    reasoning: choice.reasoning,
    toolCalls: choice.toolCalls.map(({ id, name, argumentsJson }) => ({ id, name, arguments: argumentsJson })),
    ...endFrom(choice.finished),
  }));
  return new Result(
    message.requestId,
    choices,
    usageFrom(message.usage),
    message.prompt && promptFrom(message.prompt),
    message.accepted && acceptedFrom(message.requestId, message.accepted),
  );
}

/** The cost of a request. */
export function usageFrom(message: UsageMessage | undefined): Usage {
  return {
    promptTokens: message?.promptTokens ?? 0,
    cachedTokens: message?.cachedTokens ?? 0,
    completionTokens: message?.completionTokens ?? 0,
    reasoningTokens: message?.reasoningTokens ?? 0,
    draftTokens: message?.draftTokens ?? 0,
    acceptedDraftTokens: message?.acceptedDraftTokens ?? 0,
    predictionDraftTokens: message?.predictionDraftTokens ?? 0,
    acceptedPredictionDraftTokens: message?.acceptedPredictionDraftTokens ?? 0,
  };
}

function timingsFrom(message: TimingsMessage | undefined): Timings {
  return {
    firstScheduledMs: milliseconds(message?.firstScheduledDuration),
    firstTokenMs: milliseconds(message?.firstTokenDuration),
    lastTokenMs: milliseconds(message?.lastTokenDuration),
    finishedMs: milliseconds(message?.finishedDuration),
    preemptions: message?.preemptions ?? 0,
  };
}

const FINISH_REASONS: Partial<Record<FinishReasonNumber, FinishReason>> = {
  [FinishReasonNumber.STOP]: "stop",
  [FinishReasonNumber.LENGTH]: "length",
  [FinishReasonNumber.CONTEXT]: "context",
  [FinishReasonNumber.CANCELLED]: "cancelled",
  [FinishReasonNumber.TIME_LIMIT]: "time_limit",
  [FinishReasonNumber.TOOL_CALLS]: "tool_calls",
};

function finishReasonFrom(reason: FinishReasonNumber): FinishReason {
  return FINISH_REASONS[reason] ?? "unknown";
}

function milliseconds(duration: Duration | undefined): number | undefined {
  return duration === undefined ? undefined : durationMs(duration);
}
