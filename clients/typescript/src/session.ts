/**
 * Many requests on one stream, or on one stream for each of several servers.
 *
 * @module
 */
import { abortError, DeadlineExceededError, HeadraceError, invalidArgument } from "./errors.js";
import { Fold } from "./fold.js";
import type { SessionRecord } from "./internal/session_core.js";
import type { SessionRouter } from "./internal/session_router.js";
import type { Prompt } from "./messages.js";
import { buildSpec, type GenerationOptions } from "./options.js";
import { labelTrace } from "./trace.js";
import type { Accepted, Chunk, Result, ServerLoad } from "./results.js";

/** The options of a session. */
export interface SessionOptions {
  /**
   * How long requests go on in the server after their stream was lost, in milliseconds. With a lease the session opens
   * its stream again by itself, and its requests go on where they were. Default: none, they are cancelled at once.
   */
  readonly leaseMs?: number | undefined;
  /** How many tokens of each request the server may send ahead of its reader; default 0: no limit. */
  readonly initialCredit?: number | undefined;
  /**
   * For how long a request is sent again for which the server has no room, whenever the server says that there may be
   * some, in milliseconds. Default: until there is some; 0: the request fails with the refusal at once.
   */
  readonly roomTimeoutMs?: number | undefined;
  /** How often `load` is renewed, in milliseconds, 100 to 3,600,000; it comes with results. Default: never. */
  readonly loadIntervalMs?: number | undefined;
}

/** How long to wait. */
export interface WaitOptions {
  /** Ends the wait when it is aborted; the request goes on. */
  readonly signal?: AbortSignal | undefined;
  /** The most milliseconds to wait; the request goes on afterwards. */
  readonly timeoutMs?: number | undefined;
}

/**
 * A session: many requests on one stream, their results interleaved. Made by `Client.session`.
 *
 * ```ts
 * await using session = client.session();
 * const requests = prompts.map((prompt) => session.submit(prompt, { maxTokens: 32 }));
 * for (const request of requests) {
 *   console.log((await request.result()).text);
 * }
 * ```
 */
export class Session implements AsyncDisposable {
  readonly #router: SessionRouter;
  #closed: Promise<void> | undefined;

  /** Made by `Client.session`. @internal */
  constructor(router: SessionRouter) {
    this.#router = router;
  }

  /**
   * Starts a request and returns at once. Refusals by the server are thrown by the request, not here.
   *
   * @throws InvalidArgumentError - a value cannot be sent at all.
   * @throws AlreadyExistsError - a live request of this session has that `requestId`.
   * @throws UnavailableError - the session has ended, or is being closed.
   */
  submit(prompt: Prompt, options?: GenerationOptions): SessionRequest {
    const spec = buildSpec(prompt, options);
    labelTrace(spec);
    return new SessionRequest(this.#router, this.#router.add(spec));
  }

  /**
   * Continues a request of an earlier session, or of `Client.addRequest`, on this one.
   *
   * @param requestId - the request.
   * @param options - `fromSeq`: the number of the first event wanted, by default 1; the request has only what follows.
   *   `n`: how many choices it has; needed if `fromSeq` is above 1, since the first event has it.
   * @throws InvalidArgumentError - `n` is needed.
   * @throws AlreadyExistsError - the request is live on this session.
   * @throws UnavailableError - the session has ended, or is being closed.
   */
  attach(requestId: string, options: { fromSeq?: bigint | number; n?: number } = {}): SessionRequest {
    const { n } = options;
    const fromSeq = BigInt(options.fromSeq ?? 1);
    if (n === undefined && fromSeq > 1n) {
      throw invalidArgument("n", "is not given; event 1 tells it, which does not come again with this fromSeq");
    }
    if (n !== undefined && !(Number.isInteger(n) && n >= 1)) {
      throw invalidArgument("n", `is ${n}; a request has at least 1 choice`);
    }
    return new SessionRequest(this.#router, this.#router.attach(new Fold(requestId, n ?? 0, fromSeq)));
  }

  /**
   * Continues a request whose session was lost, where it left off: the new one has all output from the beginning. This
   * works until the lost session's lease ends. If the request's end had arrived, nothing is sent.
   *
   * @throws AlreadyExistsError - the request is live on this session.
   * @throws UnavailableError - the session has ended, or is being closed.
   */
  resume(request: SessionRequest): SessionRequest {
    return new SessionRequest(this.#router, this.#router.attach(foldOf(request).reopened()));
  }

  /** How many requests have not ended. */
  get live(): number {
    return this.#router.records.size;
  }

  /** The lease that the server granted, in milliseconds; undefined until it answered. Of several servers: the shortest. */
  get leaseMs(): number | undefined {
    return this.#router.leaseMs;
  }

  /** The server's load, as it was told last. Of several servers: the sums, and the fullest cache. */
  get load(): ServerLoad | undefined {
    return this.#router.load;
  }

  /**
   * Ends the session: accepts no more requests, and resolves when the live ones have ended and the stream is closed. They
   * need no reader for that.
   *
   * @param options - `cancel`: whether to cancel the live requests instead of waiting for them.
   */
  async close(options: { cancel?: boolean } = {}): Promise<void> {
    if (this.#closed === undefined || options.cancel) {
      this.#closed = this.#router.close(options.cancel ?? false);
    }
    await this.#closed;
  }

  /** Ends the session, and cancels what still runs. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close({ cancel: true });
  }
}

const folds = new WeakMap<SessionRequest, Fold>();

function foldOf(request: SessionRequest): Fold {
  const fold = folds.get(request);
  if (fold === undefined) {
    throw invalidArgument("request", "is no request of a session");
  }
  return fold;
}

/**
 * One request of a session. Iterating gives its chunks from the first on, as they come; it may be iterated more than
 * once, and leaving the loop leaves the request running.
 *
 * ```ts
 * const request = session.submit("Once upon a time");
 * for await (const chunk of request) {
 *   process.stdout.write(chunk.text);
 * }
 * const result = await request.result();
 * ```
 */
export class SessionRequest implements AsyncIterable<Chunk> {
  readonly #router: SessionRouter;
  readonly #record: SessionRecord;

  /** Made by `Session`. @internal */
  constructor(router: SessionRouter, record: SessionRecord) {
    this.#router = router;
    this.#record = record;
    folds.set(this, record.fold);
  }

  /** The request's id, set by you or made by the client. */
  get requestId(): string {
    return this.#record.requestId;
  }

  /** The number of the event that comes next: where `Session.attach` would continue. */
  get nextSeq(): bigint {
    return this.#record.fold.nextSeq;
  }

  /** Whether the request has ended, successfully or not. */
  get done(): boolean {
    return this.#record.fold.done;
  }

  /**
   * All chunks from the first on, as they come.
   *
   * @throws HeadraceError - the request was refused, failed, or its session was lost.
   */
  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void, undefined> {
    return this.chunks();
  }

  /** The same, whose waits a signal may end. */
  async *chunks(options: WaitOptions = {}): AsyncGenerator<Chunk, void, undefined> {
    const record = this.#record;
    for (let position = 0; ; position++) {
      while (record.fold.chunks.length <= position && !record.fold.done) {
        await this.#change(options);
      }
      const chunk = record.fold.chunks[position];
      if (chunk === undefined) {
        break;
      }
      this.#router.pay(record, position + 1);
      yield chunk;
    }
    if (record.fold.error !== undefined) {
      throw record.fold.error;
    }
  }

  /**
   * Waits for the end and returns the whole result. A cancelled request has one too.
   *
   * @throws DeadlineExceededError - `timeoutMs` passed first.
   * @throws CancelledError - the signal was aborted first.
   * @throws HeadraceError - the request was refused, failed, or its session was lost.
   */
  async result(options: WaitOptions = {}): Promise<Result> {
    this.#router.payAll(this.#record);
    const wait = withEnd(options);
    while (!this.#record.fold.done) {
      await this.#change(wait);
    }
    return this.#record.fold.result();
  }

  /**
   * Waits until the server has accepted the request; returns the parameters in force.
   *
   * @throws DeadlineExceededError - `timeoutMs` passed first.
   * @throws CancelledError - the signal was aborted first.
   * @throws HeadraceError - the request was refused, or its session was lost.
   */
  async accepted(options: WaitOptions = {}): Promise<Accepted> {
    const wait = withEnd(options);
    const { fold } = this.#record;
    while (fold.accepted === undefined && !fold.done) {
      await this.#change(wait);
    }
    if (fold.accepted === undefined) {
      throw fold.error ?? new HeadraceError("the request was attached after its acceptance");
    }
    return fold.accepted;
  }

  /** Asks the server to end the request; it then ends with `cancelled` and the output so far. */
  cancel(): void {
    this.#router.cancel(this.#record);
  }

  /** Waits for a change of the request. */
  async #change({ signal, timeoutMs }: WaitOptions): Promise<void> {
    const record = this.#record;
    const { requestId } = record;
    const limit = timeoutMs === undefined ? undefined : Math.max(timeoutMs, 0);
    await new Promise<void>((resolve, reject) => {
      const settle = (error?: HeadraceError): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", aborted);
        record.offChange(changed);
        if (error === undefined) {
          resolve();
        } else {
          reject(error);
        }
      };
      const changed = (): void => settle();
      const aborted = (): void => settle(signal && abortError(signal, { requestId }));
      const late = (): void =>
        settle(new DeadlineExceededError(`request ${requestId} has not ended in time`, { requestId }));
      const timer = limit === undefined ? undefined : setTimeout(late, limit);
      record.onChange(changed);
      signal?.addEventListener("abort", aborted);
      if (signal?.aborted) {
        aborted();
      }
    });
  }
}

/** The same wait, whose time is counted from now over all its parts. */
function withEnd({ signal, timeoutMs }: WaitOptions): WaitOptions {
  const end = timeoutMs === undefined ? undefined : performance.now() + timeoutMs;
  return {
    signal,
    get timeoutMs() {
      return end === undefined ? undefined : end - performance.now();
    },
  };
}
