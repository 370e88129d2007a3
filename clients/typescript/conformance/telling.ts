// A REQUEST of the conformance suite as the library's prompt and options, and its public results and errors as
// tests/conformance/README.md has them.
import type {
  Adapter,
  BatchOutcome,
  Choice,
  Chunk,
  GenerationOptions,
  Message,
  Prompt,
  Result,
  TokenInfo,
  ToolCall,
  ToolChoiceName,
  Usage,
} from "@headrace/client";
import { HeadraceError } from "@headrace/client";
import { AdapterState } from "@headrace/client/contract";

export type Told = Record<string, unknown>;

/** What a request has. */
export interface RequestTold {
  id?: string | null;
  text?: string | null;
  token_ids?: number[] | null;
  messages?:
    | { role: Message["role"]; content?: string | null; tool_calls?: ToolCall[] | null; tool_call_id?: string | null }[]
    | null;
  tools?: { name: string; description?: string | null; parameters?: string | null }[] | null;
  tool_choice?: ToolChoiceName | null;
  max_tokens?: number | null;
  n?: number | null;
  logprobs?: number | null;
  priority?: number | null;
  max_reasoning_tokens?: number | null;
  seed?: string | null;
  stop?: string[] | null;
  json_schema?: string | null;
  structural_tag?: string | null;
  time_limit_ms?: number | null;
  prediction?: string | null;
  adapter?: string | null;
}

const REQUEST_MEMBERS = new Set(
  (
    "id text token_ids messages tools tool_choice max_tokens n logprobs priority max_reasoning_tokens seed stop " +
    "json_schema structural_tag time_limit_ms prediction adapter"
  ).split(" "),
);

/** The members of a request that this driver does not know. */
export function unknownMembers(request: RequestTold): string[] {
  return Object.entries(request).flatMap(([name, value]) =>
    value === null || REQUEST_MEMBERS.has(name) ? [] : [name],
  );
}

export function promptOf({ text, token_ids: ids, messages }: RequestTold): Prompt {
  return messages?.map(messageOf) ?? text ?? ids ?? "";
}

function messageOf(told: NonNullable<RequestTold["messages"]>[number]): Message {
  const { role, content = null, tool_calls: toolCalls, tool_call_id: toolCallId } = told;
  switch (role) {
    case "assistant":
      return { role, content, toolCalls: toolCalls ?? undefined };
    case "tool":
      return { role, content: content ?? "", toolCallId: toolCallId ?? "" };
    default:
      return { role, content: content ?? "" };
  }
}

export function optionsOf(request: RequestTold): GenerationOptions {
  const { seed, tools } = request;
  return {
    requestId: request.id ?? undefined,
    maxTokens: request.max_tokens ?? undefined,
    n: request.n ?? undefined,
    logprobs: request.logprobs ?? undefined,
    priority: request.priority ?? undefined,
    maxReasoningTokens: request.max_reasoning_tokens ?? undefined,
    stop: request.stop ?? undefined,
    jsonSchema: request.json_schema ?? undefined,
    structuralTag: request.structural_tag ?? undefined,
    timeLimitMs: request.time_limit_ms ?? undefined,
    prediction: request.prediction ?? undefined,
    adapter: request.adapter ?? undefined,
    toolChoice: request.tool_choice ?? undefined,
    seed: seed == null ? undefined : BigInt(seed),
    tools: tools?.map(({ name, description, parameters }) => ({
      name,
      description: description ?? undefined,
      parameters: parameters ?? undefined,
    })),
  };
}

function bits(value: number | undefined): string | null {
  if (value === undefined) {
    return null;
  }
  const bytes = Buffer.alloc(4);
  bytes.writeFloatBE(value);
  return bytes.toString("hex");
}

function tellToken({ id, text, bytes, logprob, rank, candidates }: TokenInfo): Told {
  return {
    id,
    text,
    bytes: Buffer.from(bytes).toString("base64"),
    logprob: bits(logprob),
    rank: rank ?? null,
    candidates: candidates.map((one) => ({
      id: one.id,
      text: one.text,
      bytes: Buffer.from(one.bytes).toString("base64"),
      logprob: bits(one.logprob),
    })),
  };
}

export function tellChunk(chunk: Chunk): Told {
  return {
    choice: chunk.choiceIndex,
    text: chunk.text,
    token_ids: chunk.tokenIds,
    reasoning: chunk.reasoning,
    tool_calls: chunk.toolCalls,
    tokens: chunk.tokens.map(tellToken),
  };
}

function tellUsage(usage: Usage): Told {
  return {
    prompt_tokens: usage.promptTokens,
    cached_tokens: usage.cachedTokens,
    completion_tokens: usage.completionTokens,
    reasoning_tokens: usage.reasoningTokens,
    draft_tokens: usage.draftTokens,
    accepted_draft_tokens: usage.acceptedDraftTokens,
    prediction_draft_tokens: usage.predictionDraftTokens,
    accepted_prediction_draft_tokens: usage.acceptedPredictionDraftTokens,
  };
}

export function tellResult(result: Result): Told {
  return {
    request_id: result.requestId,
    seed: result.seed?.toString() ?? null,
    adapter_digest: result.accepted?.adapterDigest ?? null,
    usage: tellUsage(result.usage),
    choices: result.choices.map(tellChoice),
  };
}

function tellChoice(choice: Choice): Told {
  return {
    index: choice.index,
    text: choice.text,
    token_ids: choice.tokenIds,
    reasoning: choice.reasoning,
    tool_calls: choice.toolCalls,
    tokens: choice.tokens.map(tellToken),
    finish_reason: choice.finishReason,
    stop_string: choice.stopString ?? null,
    stop_token_id: choice.stopTokenId ?? null,
    usage: tellUsage(choice.usage),
  };
}

export function tellAdapter(adapter: Adapter | undefined): Told {
  return {
    name: adapter?.name,
    digest: adapter?.digest,
    rank: adapter?.rank,
    bytes: Number(adapter?.sizeBytes),
    modules: adapter?.modules,
    state: adapter && AdapterState[adapter.state].toLowerCase(),
    pinned: adapter?.pinned,
    live: Number(adapter?.liveRequests),
    base_model: adapter?.baseModel,
  };
}

export function tellError(error: unknown): Told {
  if (!(error instanceof HeadraceError)) {
    return { foreign: String(error) };
  }
  return {
    code: error.code,
    reason: error.reason,
    message: error.message,
    metadata: error.metadata,
    fields: error.fields,
    retry_after_ms: error.retryAfterMs ?? null,
    request_id: error.requestId,
    partial: error.partial === undefined ? null : tellResult(error.partial),
  };
}

export function tellOutcome({ index, result, error }: BatchOutcome): Told {
  return error === undefined ? { index, result: tellResult(result) } : { index, error: tellError(error) };
}
