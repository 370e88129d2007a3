/**
 * Calls by a request's id: its results and its cancel, at the server that has it.
 *
 * @module
 */
import { toBinary } from "@bufbuild/protobuf";

import { type CallOptions, unary } from "./connection.js";
import { DeadlineExceededError, NotFoundError, UnavailableError } from "./errors.js";
import { Fold } from "./fold.js";
import type { ResultEvent } from "./gen/headrace/v1/generation_pb.js";
import {
  CancelStatus as CancelStatusNumber,
  type GetResultResponse,
  GetResultResponseSchema,
} from "./gen/headrace/v1/generation_service_pb.js";
import type { Pool } from "./internal/pool.js";
import { atOwner, atServer, settled } from "./internal/retries.js";
import type { Server } from "./internal/servers.js";
import { duration } from "./options.js";
import type { Result } from "./results.js";

const POLL_MS = 30_000; // of the 60 s that the contract allows: proxies cut quiet calls
const SMALL_BYTES = 64 * 1024; // far less than what a server cuts a result into
const CANCELS_PER_CALL = 1024; // the contract's limit

/** The result of a cancel. `not_found`: no such request of this caller is there. */
export type CancelStatus = "cancelled" | "already_finished" | "not_found" | "unknown";

const CANCELS: Partial<Record<CancelStatusNumber, CancelStatus>> = {
  [CancelStatusNumber.CANCELLED]: "cancelled",
  [CancelStatusNumber.ALREADY_FINISHED]: "already_finished",
};

/** The calls of one client. */
export class CallsById {
  constructor(
    private readonly pool: Pool,
    private readonly retries: number,
    private readonly rpcTimeoutMs: number,
  ) {}

  /**
   * Waits for a request's end.
   *
   * A large result comes in several answers. So an answer before the last one may be part of a finished result, which is
   * read to its end even after the timeout; or it is the present output of a running request, which grows with each call.
   * They differ in size: of two consecutive parts, split because together they would be too large, one is large.
   */
  async result(requestId: string, options: CallOptions): Promise<Result> {
    const fold = new Fold(requestId, 0);
    const end = options.timeoutMs === undefined ? undefined : performance.now() + options.timeoutMs;
    let lastBytes = SMALL_BYTES; // of the last answer that came after the end of the time
    for (;;) {
      const left = end === undefined ? POLL_MS : Math.max(end - performance.now(), 0);
      const answer = await this.#poll(fold, Math.min(left, POLL_MS), true, options.signal);
      for (const event of answer.events) {
        fold.add(event);
      }
      if (answer.done || fold.done) {
        return fold.result();
      }
      if (end === undefined || performance.now() < end) {
        continue;
      }
      const bytes = toBinary(GetResultResponseSchema, answer).length;
      if (answer.events.length === 0 || Math.max(bytes, lastBytes) < SMALL_BYTES) {
        const message = `request ${requestId} has not ended within ${options.timeoutMs} ms`;
        throw new DeadlineExceededError(message, { requestId, partial: fold.partial() });
      }
      lastBytes = bytes;
    }
  }

  /** A request's events, from the one that the fold needs next, as they come. */
  async *events(fold: Fold, signal: AbortSignal): AsyncGenerator<readonly ResultEvent[]> {
    for (;;) {
      const { events, done } = await this.#poll(fold, POLL_MS, false, signal);
      yield events;
      if (done) {
        return;
      }
    }
  }

  /** Cancels requests; of several servers, at the ones that have them, and anywhere if that is not known. */
  async cancel(ids: readonly string[], options: CallOptions): Promise<Map<string, CancelStatus>> {
    const { servers, isOne } = this.pool;
    this.pool.begin();
    const byOwner = new Map<string, string[]>();
    for (const id of ids) {
      const owner = isOne || servers.byInstance(servers.owner(id)).length === 0 ? "" : servers.owner(id);
      byOwner.set(owner, [...(byOwner.get(owner) ?? []), id]);
    }
    if (byOwner.has("") && !isOne) {
      await settled(this.pool, options.signal);
    }
    const found = new Map<string, CancelStatus>();
    for (const [owner, some] of byOwner) {
      const anywhere = isOne ? [this.pool.one] : servers.reachable();
      const at = owner === "" ? anywhere : servers.byInstance(owner).slice(0, 1);
      await this.#cancelAt(at, owner, some, options, found);
    }
    return new Map(ids.map((id) => [id, found.get(id) ?? "not_found"]));
  }

  /** Cancels at each of these servers what was not found at the ones before. */
  async #cancelAt(
    at: readonly Server[],
    instanceId: string,
    ids: readonly string[],
    options: CallOptions,
    found: Map<string, CancelStatus>,
  ): Promise<void> {
    let problem: unknown = at.length === 0 ? this.pool.servers.nobody() : undefined;
    let isAnswered = false;
    for (const server of at) {
      const left = ids.filter((id) => !found.has(id));
      for (let start = 0; start < left.length; start += CANCELS_PER_CALL) {
        try {
          await this.#cancelSome(server, instanceId, left.slice(start, start + CANCELS_PER_CALL), options, found);
          isAnswered = true;
        } catch (error) {
          if (!(error instanceof NotFoundError || error instanceof UnavailableError)) {
            throw error;
          }
          isAnswered ||= error instanceof NotFoundError; // another process is at that address now
          problem ??= error;
        }
      }
    }
    if (!isAnswered && problem !== undefined) {
      throw problem;
    }
  }

  async #cancelSome(
    server: Server,
    instanceId: string,
    requestIds: string[],
    { signal, timeoutMs = this.rpcTimeoutMs }: CallOptions,
    found: Map<string, CancelStatus>,
  ): Promise<void> {
    const { results } = await atServer(this.pool, server, { retries: this.retries, signal }, (connection) =>
      unary(connection, { signal, timeoutMs }, "", (to, given) =>
        to.generation.cancel({ requestIds, instanceId }, given),
      ),
    );
    for (const { requestId, status } of results) {
      if (status !== CancelStatusNumber.NOT_FOUND) {
        found.set(requestId, CANCELS[status] ?? "unknown");
      }
    }
  }

  async #poll(
    fold: Fold,
    waitMs: number,
    untilDone: boolean,
    signal: AbortSignal | undefined,
  ): Promise<GetResultResponse> {
    const { requestId, nextSeq: fromSeq } = fold;
    const wait = duration(waitMs, "timeoutMs");
    const call = { signal, timeoutMs: this.rpcTimeoutMs + waitMs };
    const tries = { retries: this.retries, signal };
    const answer = await atOwner(this.pool, requestId, tries, (connection, instanceId) =>
      unary(connection, call, requestId, (at, given) =>
        at.generation.getResult({ requestId, fromSeq, wait, untilDone, instanceId }, given),
      ),
    );
    this.pool.servers.noteOwner(requestId, answer.instanceId);
    if (answer.done) {
      this.pool.servers.endedAlone(requestId);
    }
    return answer;
  }
}
