/**
 * One request on a stream of its own.
 *
 * @module
 */
import { type CallOptions, stubOptions } from "./connection.js";
import { errorFromCall, errorFromStatus, HeadraceError, UnavailableError } from "./errors.js";
import type { Fold } from "./fold.js";
import type { ResultEvent } from "./gen/headrace/v1/generation_pb.js";
import type { GenerateStreamRequest } from "./gen/headrace/v1/generation_service_pb.js";
import { prefixKeys } from "./internal/placement.js";
import type { Pool } from "./internal/pool.js";
import { Attempts } from "./internal/retries.js";
import type { Server } from "./internal/servers.js";
import type { Chunk, Result } from "./results.js";

/**
 * One request and its output as it comes. Iterating gives its chunks; leaving the loop before the end cancels the
 * request. Made by `Client.stream` and `Client.attach`.
 *
 * ```ts
 * const stream = client.stream("Once upon a time");
 * for await (const chunk of stream) {
 *   process.stdout.write(chunk.text);
 * }
 * const result = await stream.result();
 * ```
 */
export class RequestStream implements AsyncIterable<Chunk>, AsyncDisposable {
  readonly #fold: Fold;
  readonly #events: AsyncIterator<readonly ResultEvent[]>;
  readonly #abort: AbortController;
  readonly #cancel: (requestId: string) => Promise<unknown>;
  #pull: Promise<void> | undefined;

  /** Made by `Client`. @internal */
  constructor(
    fold: Fold,
    events: AsyncIterator<readonly ResultEvent[]>,
    abort: AbortController,
    cancel: (requestId: string) => Promise<unknown>,
  ) {
    this.#fold = fold;
    this.#events = events;
    this.#abort = abort;
    this.#cancel = cancel;
    void this.#more(); // the call begins now
  }

  /** The request's id, set by you or made by the client. */
  get requestId(): string {
    return this.#fold.requestId;
  }

  /** Whether the request has ended, as far as it was read. */
  get done(): boolean {
    return this.#fold.done;
  }

  /**
   * All chunks from the first on, as they come.
   *
   * @throws HeadraceError - the request was refused, failed, or its connection was lost; `partial` has what came.
   */
  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk, void, undefined> {
    const fold = this.#fold;
    try {
      for (let position = 0; ; position++) {
        while (fold.chunks.length <= position && !fold.done) {
          await this.#more();
        }
        const chunk = fold.chunks[position];
        if (chunk === undefined) {
          break;
        }
        yield chunk;
      }
    } finally {
      if (!fold.done) {
        await this.close();
      }
    }
    if (fold.error !== undefined) {
      throw fold.error;
    }
  }

  /**
   * Reads to the end and returns the whole result. A request that was cancelled by its id has one too.
   *
   * @throws HeadraceError - the request was refused, failed, or its connection was lost; `partial` has what came.
   */
  async result(): Promise<Result> {
    while (!this.#fold.done) {
      await this.#more();
    }
    return this.#fold.result();
  }

  /** Asks the server to end the request; it then ends with `cancelled` and the output so far. */
  async cancel(): Promise<void> {
    await this.#cancel(this.#fold.requestId);
  }

  /** Leaves the stream: its call is cancelled, and with it the request. */
  async close(): Promise<void> {
    if (!this.#fold.done) {
      this.#abort.abort();
      await this.#more();
    }
  }

  /** Leaves the stream. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Reads the next message; all who wait share it. Never rejects: the fold has the failure. */
  async #more(): Promise<void> {
    this.#pull ??= this.#read();
    await this.#pull;
    this.#pull = undefined;
  }

  async #read(): Promise<void> {
    const fold = this.#fold;
    try {
      const { done, value } = await this.#events.next();
      if (done) {
        fold.fail(new UnavailableError("the server ended the stream before the request"));
        return;
      }
      for (const event of value) {
        fold.add(event);
      }
      if (fold.done) {
        void this.#end();
      }
    } catch (failure) {
      fold.fail(failure instanceof HeadraceError ? failure : new HeadraceError(String(failure), { cause: failure }));
    }
  }

  /** Reads the call's own end, which tells nothing new; a stream that goes on after the end is cancelled. */
  async #end(): Promise<void> {
    try {
      const { done } = await this.#events.next();
      if (!done) {
        this.#abort.abort();
      }
    } catch {
      // The request's end was told, which is what counts.
    }
  }
}

/** What a stream's call is made with. */
export interface StreamCall extends CallOptions {
  readonly request: GenerateStreamRequest;
  readonly retries: number;
  /** Aborted by the stream or by its user. */
  readonly signal: AbortSignal;
}

/**
 * The events of a GenerateStream. With several servers, the call is made again elsewhere until there is output; then the
 * fold begins anew.
 */
export async function* streamedEvents(
  pool: Pool,
  fold: Fold,
  call: StreamCall,
): AsyncGenerator<readonly ResultEvent[]> {
  pool.begin();
  if (pool.isOne) {
    yield* eventsFrom(pool.one, fold, call);
    return;
  }
  const { request, retries, signal } = call;
  const attempts = new Attempts(pool, { retries, signal, keys: request.spec && prefixKeys(request.spec) });
  for (;;) {
    const server = await attempts.next();
    pool.servers.begun(server);
    try {
      for await (const events of eventsFrom(server, fold, call)) {
        const failure = undelivered(fold, events);
        if (failure !== undefined) {
          throw failure;
        }
        yield events;
      }
      pool.servers.budget.succeeded();
      return;
    } catch (error) {
      if (fold.chunks.length > 0 || fold.done) {
        throw error;
      }
      await attempts.failed(server, error);
      fold.restart();
    } finally {
      pool.servers.over(server);
    }
  }
}

async function* eventsFrom(server: Server, fold: Fold, call: StreamCall): AsyncGenerator<readonly ResultEvent[]> {
  const { target, generation } = server.connection;
  const { requestId } = fold;
  try {
    for await (const { events, instanceId } of generation.generateStream(call.request, stubOptions(call))) {
      server.instanceId = instanceId || server.instanceId;
      yield events;
    }
  } catch (failure) {
    throw errorFromCall(failure, { target, signal: call.signal, requestId });
  }
}

/** The failure that these events tell, if it is one of the server's and the request has no output yet. */
function undelivered(fold: Fold, events: readonly ResultEvent[]): UnavailableError | undefined {
  if (fold.chunks.length > 0) {
    return undefined;
  }
  for (const { event } of events) {
    if (event.case === "delta") {
      return undefined;
    }
    if (event.case === "failed" && event.value.status !== undefined) {
      const error = errorFromStatus(event.value.status, { requestId: fold.requestId });
      return error instanceof UnavailableError ? error : undefined;
    }
  }
  return undefined;
}
