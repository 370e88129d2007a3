/**
 * Which failures are worth another try, what they say of a server, and the tries of unary calls and of the opening of a
 * stream. docs/clients.md and docs/fleet.md tell the rules.
 *
 * @module
 */
import { setTimeout as sleep } from "node:timers/promises";

import { ConnectError } from "@connectrpc/connect";

import type { Connection } from "../connection.js";
import {
  abortError,
  CancelledError,
  type HeadraceError,
  NotFoundError,
  ResourceExhaustedError,
  UnavailableError,
} from "../errors.js";
import type { PrefixKeys } from "./placement.js";
import type { Pool } from "./pool.js";
import { PATIENCE_MS, type Server } from "./servers.js";

/** The reason of a refusal by another server process than the one that was meant. */
export const WRONG_INSTANCE = "WRONG_INSTANCE";
const ADAPTER_NOT_LOADED = "ADAPTER_NOT_LOADED";
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;

/**
 * Whether the same may succeed later, or elsewhere: the server was lost or is not ready, or it has no room and says when
 * to come again.
 */
export function isWorthARetry(error: HeadraceError): boolean {
  if (error.isFinal) {
    return false;
  }
  if (error instanceof ResourceExhaustedError) {
    return error.retryAfterMs !== undefined;
  }
  const isCutOff = error instanceof CancelledError && error.cause instanceof ConnectError; // nobody asked for it here
  return error instanceof UnavailableError || isCutOff;
}

/** Whether a stream that ended like this was lost, with what it carried: see docs/clients.md. */
export function isLostStream(error: HeadraceError): boolean {
  if (error.code === "INTERNAL" || error.code === "UNKNOWN") {
    return error.reason === "";
  }
  return error.code === "UNAVAILABLE" || error.code === "CANCELLED";
}

/** Whether a server lacks the request's adapter. Another is then asked, each once: that is no retry, and needs no pause. */
export function lacksAdapter(error: unknown): boolean {
  return isHeadraceError(error) && error.reason === ADAPTER_NOT_LOADED;
}

/** What a server's failure says of it: it has no room for a while, or is not ready. */
export function noteFailure(pool: Pool, server: Server, error: HeadraceError): void {
  if (error instanceof ResourceExhaustedError) {
    pool.servers.full(server, error.retryAfterMs ?? 0);
  } else {
    pool.setAside(server, error);
  }
}

/** What a call is made with. */
export interface Tries {
  /** How often it may be tried again. */
  readonly retries: number;
  readonly signal: AbortSignal | undefined;
  /** Of its prompt. */
  readonly keys?: PrefixKeys | undefined;
  /** Whether a lost connection is no reason to go elsewhere at once: the server may have taken the request. */
  readonly sticks?: boolean | undefined;
}

/** Makes a call that any server may answer, until it is answered or there is no further try. */
export async function withRetries<T>(
  pool: Pool,
  tries: Tries,
  call: (connection: Connection, server: Server) => Promise<T>,
): Promise<T> {
  pool.begin();
  return pool.isOne ? atServer(pool, pool.one, tries, call) : anyServer(pool, tries, call);
}

/** Makes a call to one server, until it is answered or there is no further try. */
export async function atServer<T>(
  pool: Pool,
  server: Server,
  { retries, signal }: Tries,
  call: (connection: Connection, server: Server) => Promise<T>,
): Promise<T> {
  for (let tried = 0; ; tried++) {
    try {
      return await call(server.connection, server);
    } catch (error) {
      if (!mayRetry(pool, error, tried, retries)) {
        throw error;
      }
      await pause(error.retryAfterMs ?? longest(tried) * pool.servers.jitter(), signal);
    }
  }
}

async function anyServer<T>(
  pool: Pool,
  tries: Tries,
  call: (connection: Connection, server: Server) => Promise<T>,
): Promise<T> {
  const attempts = new Attempts(pool, tries);
  for (;;) {
    const server = await attempts.next();
    pool.servers.begun(server);
    try {
      const answer = await call(server.connection, server);
      pool.servers.budget.succeeded();
      return answer;
    } catch (error) {
      await attempts.failed(server, error);
    } finally {
      pool.servers.over(server);
    }
  }
}

/** The tries of one call in a fleet: to which server it goes now, and after a failure, where and when it goes next. */
export class Attempts {
  readonly #tried = new Set<Server>();
  readonly #lacking = new Set<Server>();
  readonly #began: number;
  #same: Server | undefined;
  #count = 0;
  #pauses = 0;
  #evenFull = false;

  constructor(
    private readonly pool: Pool,
    private readonly tries: Tries,
  ) {
    this.#began = pool.servers.clock();
  }

  /** The server to call; waits for one, if none is ready and has room. */
  async next(): Promise<Server> {
    const { servers } = this.pool;
    for (;;) {
      this.pool.begin();
      const server = this.#same ?? this.#choose(this.#evenFull);
      if (server !== undefined) {
        return server;
      }
      const roomIn = servers.roomIn(this.#lacking);
      if (roomIn !== undefined) {
        this.#evenFull = true; // it has waited once; now it may ask
        await pause(roomIn, this.tries.signal);
        continue;
      }
      const left = this.#began + PATIENCE_MS - servers.clock();
      if (left <= 0) {
        throw servers.nobody();
      }
      await this.pool.changed(left, this.tries.signal);
      if (this.tries.signal?.aborted) {
        throw abortError(this.tries.signal);
      }
    }
  }

  /** Notes a failed try, and waits until the next one may be made; throws if there is none. */
  async failed(server: Server, error: unknown): Promise<void> {
    const { pool, tries } = this;
    const { servers } = pool;
    if (lacksAdapter(error)) {
      this.#same = undefined;
      this.#lacking.add(server);
      if (pool.isClosed || servers.roomIn(this.#lacking) === undefined) {
        throw error;
      }
      return;
    }
    if (!mayRetry(pool, error, this.#count, tries.retries)) {
      if (error instanceof UnavailableError && !pool.isClosed) {
        pool.setAside(server, error);
      }
      throw error;
    }
    this.#count += 1;
    const mayAtOnce = servers.budget.failed();
    if (tries.sticks && this.#same === undefined && error.reason === "") {
      this.#same = server;
      await (mayAtOnce ? undefined : this.#pause(error));
      return;
    }
    this.#same = undefined;
    noteFailure(pool, server, error);
    this.#tried.add(server);
    const other = this.#choose(false);
    if (mayAtOnce && other !== undefined && !this.#tried.has(other)) {
      return;
    }
    this.#tried.clear();
    this.#evenFull = true;
    await this.#pause(error);
  }

  #choose(evenFull: boolean): Server | undefined {
    return this.pool.servers.choose(this.tries.keys, { avoid: this.#tried, without: this.#lacking, evenFull });
  }

  async #pause(error: HeadraceError): Promise<void> {
    const own = longest(this.#pauses) * (0.5 + this.pool.servers.jitter());
    if (error.retryAfterMs === undefined) {
      this.#pauses += 1;
    }
    await pause(error.retryAfterMs ?? own, this.tries.signal);
  }
}

/** Makes a call to the server that has a request: to the instance that an answer named, else to one after another. */
export async function atOwner<T>(
  pool: Pool,
  requestId: string,
  { retries, signal }: Tries,
  call: (connection: Connection, instanceId: string) => Promise<T>,
): Promise<T> {
  pool.begin();
  if (pool.isOne) {
    return atServer(pool, pool.one, { retries, signal }, (connection) => call(connection, ""));
  }
  const { servers } = pool;
  const owner = servers.owner(requestId);
  if (owner === "") {
    await settled(pool, signal);
  }
  const gone = (cause?: HeadraceError): UnavailableError =>
    new UnavailableError(`the server that had request "${requestId}" (instance ${owner}) is gone`, {
      requestId,
      cause,
    });
  let left = owner === "" ? servers.reachable() : servers.byInstance(owner).slice(0, 1);
  let problem: HeadraceError | undefined;
  let followed = false;
  for (let tried = 0; ;) {
    const [server] = left;
    if (server === undefined) {
      throw problem ?? (owner === "" ? servers.nobody() : gone());
    }
    try {
      return await call(server.connection, owner);
    } catch (error) {
      if (error instanceof NotFoundError && error.reason === WRONG_INSTANCE) {
        server.instanceId = error.metadata["instance_id"] ?? "";
        left = servers.byInstance(owner).filter((one) => one !== server);
        if (followed || left.length === 0) {
          throw gone(error);
        }
        followed = true;
      } else if (error instanceof NotFoundError && owner === "") {
        left = left.slice(1);
        problem ??= error;
      } else if (mayRetry(pool, error, tried, retries)) {
        servers.budget.failed();
        await pause(error.retryAfterMs ?? longest(tried) * (0.5 + servers.jitter()), signal);
        tried += 1;
      } else if (owner === "" && isHeadraceError(error) && isWorthARetry(error) && !pool.isClosed) {
        left = left.slice(1);
        problem = error; // it may be there: more than that it is nowhere else
      } else {
        throw error;
      }
    }
  }
}

/** Waits until all servers have been asked whether they are ready, at most as long as a request waits for one. */
export async function settled(pool: Pool, signal: AbortSignal | undefined): Promise<void> {
  const end = performance.now() + PATIENCE_MS;
  while (!pool.servers.isSettled && performance.now() < end && !pool.isClosed) {
    await pool.changed(end - performance.now(), signal);
    if (signal?.aborted) {
      throw abortError(signal);
    }
  }
}

function mayRetry(pool: Pool, error: unknown, tried: number, retries: number): error is HeadraceError {
  return tried < retries && !pool.isClosed && isHeadraceError(error) && isWorthARetry(error);
}

function isHeadraceError(error: unknown): error is HeadraceError {
  return error instanceof Error && "retryAfterMs" in error;
}

/** The bound of the pause after so many failures: 0.1 s, three times as long each. */
function longest(times: number): number {
  return Math.min(FIRST_PAUSE_MS * 3 ** times, LONGEST_PAUSE_MS);
}

/** Waits; rejects if the signal is aborted meanwhile. */
export async function pause(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  try {
    await sleep(milliseconds, undefined, signal === undefined ? {} : { signal });
  } catch {
    throw signal === undefined ? new CancelledError("the wait was aborted") : abortError(signal);
  }
}

/** Waits for a promise, at most so many milliseconds; returns whether it came. */
export async function within(promise: Promise<unknown>, milliseconds: number | undefined): Promise<boolean> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<false>((resolve) => {
    timer = milliseconds === undefined ? undefined : setTimeout(() => resolve(false), milliseconds);
  });
  const isInTime = await Promise.race([promise.then(() => true), late]);
  clearTimeout(timer);
  return isInTime;
}
