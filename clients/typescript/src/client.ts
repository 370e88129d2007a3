/**
 * The client.
 *
 * @module
 */
import { randomUUID } from "node:crypto";

import { create } from "@bufbuild/protobuf";

import { type BatchInput, type BatchOptions, type BatchOutcome, runBatch } from "./batch.js";
import { CallsById, type CancelStatus } from "./by_id.js";
import { withCapabilities } from "./capabilities.js";
import {
  type CallOptions,
  type Connection,
  type ConnectionOptions,
  positive,
  settingsFrom,
  unary,
} from "./connection.js";
import { Control } from "./control.js";
import { invalidArgument, NotFoundError, UnavailableError } from "./errors.js";
import { Fold } from "./fold.js";
import { HealthCheckResponse_ServingStatus as ServingStatus } from "./gen/grpc/health/v1/health_pb.js";
import { AcceptedSchema, type GenerationSpec } from "./gen/headrace/v1/generation_pb.js";
import {
  AddRequestRequestSchema,
  GenerateRequestSchema,
  GenerateStreamRequestSchema,
} from "./gen/headrace/v1/generation_service_pb.js";
import {
  type Adapter,
  GetModelRequestSchema,
  ListAdaptersRequestSchema,
  type ModelCard,
  TokenizeRequestSchema,
} from "./gen/headrace/v1/model_service_pb.js";
import { prefixKeys } from "./internal/placement.js";
import { GENERATION_SERVICE, Pool } from "./internal/pool.js";
import { pause, withRetries } from "./internal/retries.js";
import { SessionRouter } from "./internal/session_router.js";
import type { Message, Prompt } from "./messages.js";
import { buildSpec, type ChatParameters, choicesOf, type GenerationOptions, inputFrom, setChat } from "./options.js";
import { type Accepted, acceptedFrom, type Result, resultFrom, type Tokenization, tokenFrom } from "./results.js";
import { Session, type SessionOptions } from "./session.js";
import { RequestStream, streamedEvents } from "./stream.js";
import { type RunnableTool, runTools, type ToolRunOptions, type ToolTurn } from "./tool_run.js";
import { DEFAULT_TARGET, parseTargets, textOf } from "./targets.js";

const READY_POLL_MS = 200;
const PAGE_SIZE = 1000; // the contract's limit
const MOST_TIMEOUT_MS = 2 ** 31 - 1; // of Node's timers

/** How a client connects, and how it calls. */
export interface ClientOptions extends ConnectionOptions {
  /** How often a call that failed for the server's or the connection's sake is made again; default 3. */
  readonly retries?: number | undefined;
  /** The most milliseconds of a short call (not of generate, streams, sessions); default 30,000. */
  readonly rpcTimeoutMs?: number | undefined;
}

/** The options of one request and of its call. */
export interface GenerateOptions extends GenerationOptions, CallOptions {
  /** Capabilities that the server must have besides those of what the request sets, such as `typed_replies`. */
  readonly requiredCapabilities?: readonly string[] | undefined;
}

/** A server's health. */
export type HealthStatus = "serving" | "not_serving" | "service_unknown" | "unknown";

/**
 * A client of one Headrace server, or of several as one. It connects at its first call, and keeps no process alive
 * while no call runs.
 *
 * ```ts
 * await using client = new Client("localhost:50051");
 * console.log((await client.generate("Once upon a time", { maxTokens: 32 })).text);
 * ```
 */
export class Client implements AsyncDisposable {
  /** The server's address; of several servers, the targets. */
  readonly target: string;
  readonly #pool: Pool;
  readonly #retries: number;
  readonly #rpcTimeoutMs: number;
  readonly #byId: CallsById;

  /**
   * @param target - `host:port`, `unix:/path`, `dns:///name:port` (every address of the name is a server), or several of
   *   them: an array, or one text with commas. Default: the variable `HEADRACE_TARGET`, else `127.0.0.1:50051`.
   * @param options - how to connect.
   * @throws InvalidArgumentError - options contradict each other, or the target is not understood.
   */
  constructor(target?: string | readonly string[], options: ClientOptions = {}) {
    const places = parseTargets(target ?? (process.env["HEADRACE_TARGET"] || DEFAULT_TARGET));
    this.target = places.map(textOf).join(",");
    this.#pool = new Pool(places, settingsFrom(options, places));
    this.#retries = positive(options.retries ?? 3, "retries", 0);
    this.#rpcTimeoutMs = positive(options.rpcTimeoutMs ?? 30_000, "rpcTimeoutMs", 1);
    this.#byId = new CallsById(this.#pool, this.#retries, this.#rpcTimeoutMs);
  }

  /** Closes all connections; what still runs on them is cancelled. */
  async close(): Promise<void> {
    this.#pool.close();
  }

  /** Closes all connections. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // ---- one request ----------------------------------------------------------------------------------------------------

  /**
   * Runs one request and returns its whole result. If the connection is lost meanwhile, it is called again, with the same
   * id: what has finished is not computed twice.
   *
   * @throws HeadraceError - the request was refused or failed; the class says why. The signal's abort is `CancelledError`.
   */
  async generate(prompt: Prompt, options: GenerateOptions = {}): Promise<Result> {
    const { spec, call, requiredCapabilities } = requestOf(prompt, options);
    const request = create(GenerateRequestSchema, { spec, requiredCapabilities });
    withCapabilities(GenerateRequestSchema, request);
    const tries = { retries: this.#retries, signal: call.signal, keys: prefixKeys(spec) };
    return withRetries(this.#pool, tries, async (connection) => {
      const answer = await unary(connection, call, spec.requestId, (at, given) =>
        at.generation.generate(request, given),
      );
      this.#pool.servers.noteOwner(answer.requestId, answer.instanceId);
      return resultFrom(answer);
    });
  }

  /**
   * Runs one request and streams its output. The call begins at once; the signal's abort cancels the request.
   *
   * @throws InvalidArgumentError - a value cannot be sent at all. Refusals by the server are thrown by the stream.
   */
  stream(prompt: Prompt, options: GenerateOptions = {}): RequestStream {
    const { spec, call, requiredCapabilities } = requestOf(prompt, options);
    const request = create(GenerateStreamRequestSchema, { spec, requiredCapabilities });
    withCapabilities(GenerateStreamRequestSchema, request);
    const fold = new Fold(spec.requestId, choicesOf(spec));
    const abort = new AbortController();
    const signal = call.signal === undefined ? abort.signal : AbortSignal.any([abort.signal, call.signal]);
    const events = streamedEvents(this.#pool, fold, { ...call, request, signal, retries: this.#retries });
    return new RequestStream(fold, events, abort, (id) => this.cancel(id));
  }

  /**
   * Holds a conversation with tools, and gives each reply of the model: its calls are run, at the same time, and it is
   * told what they returned, until it calls none. `ToolTurn.end` tells why it ended.
   *
   * @throws HeadraceError - a request was refused or failed.
   */
  runTools(
    messages: readonly Message[],
    tools: readonly RunnableTool[],
    options: ToolRunOptions = {},
  ): AsyncGenerator<ToolTurn, void, undefined> {
    // Without this capability calls would come as text.
    const requiredCapabilities = tools.length > 0 ? ["typed_replies"] : [];
    const generate = (conversation: readonly Message[], given: GenerateOptions): Promise<Result> =>
      this.generate(conversation, { ...given, requiredCapabilities });
    return runTools(generate, messages, tools, options);
  }

  // ---- many requests --------------------------------------------------------------------------------------------------

  /** Opens a session: many requests on one stream. */
  session(options: SessionOptions = {}): Session {
    const { leaseMs, initialCredit = 0, roomTimeoutMs, loadIntervalMs } = options;
    if (!Number.isInteger(initialCredit) || initialCredit < 0 || initialCredit >= 2 ** 32) {
      throw invalidArgument("initialCredit", `is ${initialCredit}; a whole number from 0 to 2^32 - 1 is needed`);
    }
    for (const [name, value] of Object.entries({ leaseMs, roomTimeoutMs, loadIntervalMs })) {
      positive(value ?? 0, name, 0);
    }
    return new Session(
      new SessionRouter(this.#pool, {
        leaseMs,
        initialCredit,
        loadIntervalMs,
        roomTimeoutMs: roomTimeoutMs ?? Number.POSITIVE_INFINITY,
        restarts: false,
      }),
    );
  }

  /**
   * Runs any number of requests over one session, a bounded number of them at a time, and gives the outcome of each as
   * it ends. A request that was refused or failed has its error as outcome. Leaving the loop cancels what runs. Requests
   * are read as they are needed.
   *
   * ```ts
   * for await (const { index, result, error } of client.batch(prompts, { maxTokens: 64 })) {
   *   texts[index] = error === undefined ? result.text : error.message;
   * }
   * ```
   *
   * @throws UnavailableError - the connection was lost; before that, requests in flight were given as errors.
   */
  batch(requests: BatchInput, options: BatchOptions = {}): AsyncGenerator<BatchOutcome, void, undefined> {
    const open = (): SessionRouter =>
      new SessionRouter(this.#pool, {
        leaseMs: undefined,
        initialCredit: 0,
        loadIntervalMs: undefined,
        roomTimeoutMs: this.#pool.isOne ? 0 : Number.POSITIVE_INFINITY, // on one server the batch waits as a whole
        restarts: true,
      });
    return runBatch(open, requests, options);
  }

  // ---- requests that run by themselves --------------------------------------------------------------------------------

  /**
   * Starts a request that runs without a stream, and resolves once the server has accepted it. Its result is kept for
   * `getResult` and `attach`, and for a while after its end. To call it again with the same `requestId`, prompt and options
   * starts nothing, and returns the same.
   *
   * @throws AlreadyExistsError - there is another request with that `requestId`.
   * @throws HeadraceError - the request was refused.
   */
  async addRequest(prompt: Prompt, options: GenerateOptions = {}): Promise<Accepted> {
    const { spec, call, requiredCapabilities } = requestOf(prompt, options);
    const request = create(AddRequestRequestSchema, { spec, requiredCapabilities });
    withCapabilities(AddRequestRequestSchema, request);
    const tries = { retries: this.#retries, signal: call.signal, keys: prefixKeys(spec), sticks: true };
    return withRetries(this.#pool, tries, async (connection, server) => {
      const answer = await unary(connection, this.#short(call), spec.requestId, (at, given) =>
        at.generation.addRequest(request, given),
      );
      this.#pool.servers.noteOwner(answer.requestId, answer.instanceId);
      if (!this.#pool.isOne) {
        this.#pool.servers.runsAlone(answer.requestId, server);
      }
      return acceptedFrom(answer.requestId, answer.accepted ?? create(AcceptedSchema));
    });
  }

  /**
   * Waits for the end of a request that runs without a stream, and returns its whole result. Reading does not consume:
   * the result may be read again while it is kept.
   *
   * @param requestId - the request.
   * @param options - `timeoutMs`: the most milliseconds to wait for the end.
   * @throws NotFoundError - there is no such request, or its result is no longer kept.
   * @throws DeadlineExceededError - `timeoutMs` passed first; the request goes on.
   * @throws HeadraceError - the request failed.
   */
  async getResult(requestId: string, options: CallOptions = {}): Promise<Result> {
    return this.#byId.result(requestId, options);
  }

  /**
   * Streams the output of a request that `addRequest` started. Several readers may do so, and leaving the stream does not
   * affect the request.
   *
   * @param requestId - the request.
   * @param options - `fromSeq`: the number of the first event wanted, by default 1; the stream has only what follows.
   */
  attach(requestId: string, options: { fromSeq?: bigint | number; signal?: AbortSignal } = {}): RequestStream {
    const fold = new Fold(requestId, 0, BigInt(options.fromSeq ?? 1));
    const abort = new AbortController();
    const signal = options.signal === undefined ? abort.signal : AbortSignal.any([abort.signal, options.signal]);
    return new RequestStream(fold, this.#byId.events(fold, signal), abort, (id) => this.cancel(id));
  }

  /**
   * Ends requests of this identity by their ids; returns the result for each.
   *
   * @throws HeadraceError - the server cannot be reached, or refuses the caller.
   */
  async cancel(ids: string | Iterable<string>, options: CallOptions = {}): Promise<Map<string, CancelStatus>> {
    return this.#byId.cancel(typeof ids === "string" ? [ids] : [...new Set(ids)], options);
  }

  // ---- the model and the server ---------------------------------------------------------------------------------------

  /**
   * The model and the server's limits.
   *
   * @throws UnavailableError - the server cannot be reached, or its model is still loading.
   */
  async model(options: CallOptions = {}): Promise<ModelCard> {
    const { model } = await this.#any(options, (at, given) => at.models.getModel(create(GetModelRequestSchema), given));
    if (model === undefined) {
      throw new UnavailableError("the server has no model yet");
    }
    return model;
  }

  /** The adapters that the caller may use, by name; of several servers, those of one. */
  async adapters(options: CallOptions = {}): Promise<Adapter[]> {
    const request = create(ListAdaptersRequestSchema, { pageSize: PAGE_SIZE });
    const found: Adapter[] = [];
    do {
      const answer = await this.#any(options, (at, given) => at.models.listAdapters(request, given));
      found.push(...answer.adapters);
      request.pageToken = answer.nextPageToken;
    } while (request.pageToken !== "");
    return found;
  }

  /**
   * What operators do.
   *
   * @throws InvalidArgumentError - the client has several servers.
   */
  get control(): Control {
    if (!this.#pool.isOne) {
      throw invalidArgument("target", "names several servers; control is of one, so make a client of its address");
    }
    this.#pool.begin();
    return new Control(this.#pool.one.connection, this.#rpcTimeoutMs);
  }

  /**
   * The tokens of a text or a conversation, exactly as in a request with it.
   *
   * @throws HeadraceError - the server refused it, or cannot be reached.
   */
  async tokenize(
    prompt: string | readonly Message[],
    options: Omit<ChatParameters, "toolChoice" | "parallelToolCalls"> &
      CallOptions & { tokenDetails?: boolean; addSpecialTokens?: boolean } = {},
  ): Promise<Tokenization> {
    const { tokenDetails = false, addSpecialTokens, signal, timeoutMs, ...chat } = options;
    const input = inputFrom(prompt);
    if (input.case === "tokens" || input.case === undefined) {
      throw invalidArgument("prompt", "is token ids, which are tokenized already");
    }
    if (addSpecialTokens !== undefined) {
      if (input.case !== "text") {
        throw invalidArgument("addSpecialTokens", "belongs to a text prompt");
      }
      input.value.addSpecialTokens = addSpecialTokens;
    }
    setChat({ input }, chat);
    const request = create(TokenizeRequestSchema, { input, tokenDetails });
    withCapabilities(TokenizeRequestSchema, request);
    const { tokenIds, tokens } = await this.#any({ signal, timeoutMs }, (at, given) =>
      at.models.tokenize(request, given),
    );
    return { tokenIds, tokens: tokens.map(tokenFrom) };
  }

  /**
   * The text of token ids.
   *
   * @throws HeadraceError - an id is out of range, or the server cannot be reached.
   */
  async detokenize(
    tokenIds: readonly number[],
    options: CallOptions & { skipSpecialTokens?: boolean } = {},
  ): Promise<string> {
    const { skipSpecialTokens, ...call } = options;
    const request = { tokenIds: [...tokenIds], ...(skipSpecialTokens === undefined ? {} : { skipSpecialTokens }) };
    return (await this.#any(call, (at, given) => at.models.detokenize(request, given))).text;
  }

  /**
   * Whether the server is ready for requests; with an empty service name, whether it is alive.
   *
   * @throws HeadraceError - the server cannot be reached, or refuses the caller.
   */
  async health(options: CallOptions & { service?: string } = {}): Promise<HealthStatus> {
    const { service = GENERATION_SERVICE, ...call } = options;
    try {
      const { status } = await this.#any(call, (at, given) => at.health.check({ service }, given));
      return HEALTH[status] ?? "unknown";
    } catch (error) {
      if (error instanceof NotFoundError) {
        return "service_unknown";
      }
      throw error;
    }
  }

  /**
   * Resolves once the server can be reached and its model is loaded.
   *
   * @throws UnavailableError - that did not happen within `timeoutMs`, by default a minute.
   */
  async waitUntilReady(options: CallOptions = {}): Promise<void> {
    const end = performance.now() + (options.timeoutMs ?? 60_000);
    for (;;) {
      let problem = new UnavailableError(`the server at ${this.target} is not ready`);
      try {
        if ((await this.health({ signal: options.signal })) === "serving") {
          return;
        }
      } catch (error) {
        if (!(error instanceof UnavailableError)) {
          throw error;
        }
        problem = error;
      }
      if (performance.now() >= end) {
        throw problem;
      }
      await pause(READY_POLL_MS, options.signal);
    }
  }

  // ---- calls ----------------------------------------------------------------------------------------------------------

  /** A short call that any server may answer. */
  async #any<T>(
    options: CallOptions,
    call: (connection: Connection, options: { signal?: AbortSignal; timeoutMs?: number }) => Promise<T>,
  ): Promise<T> {
    return withRetries(this.#pool, this.#tries(options.signal), (connection) =>
      unary(connection, this.#short(options), "", call),
    );
  }

  #tries(signal: AbortSignal | undefined) {
    return { retries: this.#retries, signal };
  }

  #short({ signal, timeoutMs }: CallOptions): CallOptions {
    return { signal, timeoutMs: timeoutMs ?? this.#rpcTimeoutMs };
  }
}

const HEALTH: Partial<Record<ServingStatus, HealthStatus>> = {
  [ServingStatus.SERVING]: "serving",
  [ServingStatus.NOT_SERVING]: "not_serving",
  [ServingStatus.SERVICE_UNKNOWN]: "service_unknown",
};

/** A request with an id, by which it can be cancelled from the start and tried again without harm; and its call's options. */
function requestOf(
  prompt: Prompt,
  options: GenerateOptions,
): { spec: GenerationSpec; call: CallOptions; requiredCapabilities: string[] } {
  const { signal, timeoutMs, requiredCapabilities = [], ...rest } = options;
  if (timeoutMs !== undefined && !(timeoutMs > 0 && timeoutMs <= MOST_TIMEOUT_MS)) {
    throw invalidArgument("timeoutMs", `is ${timeoutMs}; above 0, and at most ${MOST_TIMEOUT_MS}, is needed`);
  }
  const spec = buildSpec(prompt, rest);
  spec.requestId ||= randomUUID();
  return { spec, call: { signal, timeoutMs }, requiredCapabilities: [...requiredCapabilities] };
}
