/**
 * One session, without its public face: which server each request is with, and where it goes when that server has no
 * room, drains or dies. docs/clients.md and docs/fleet.md tell the rules.
 *
 * 1. `add` chooses a server and gives the request to the `SessionCore` of the stream there, a link, which is opened when
 *    the first request goes there.
 * 2. Each stream's messages come to `#received`, and its end to `#lost`.
 * 3. A request that a server refuses goes elsewhere, or waits as long as the server said.
 * 4. When a stream is lost, requests of which nothing was delivered are sent again, with the same ids. Begun ones are
 *    attached again where they live, until the lease has passed; without a lease they fail with what was delivered.
 *
 * With one server and without a lease there is no point 4, and the session ends with its stream.
 *
 * @module
 */
import { randomUUID } from "node:crypto";

import {
  AlreadyExistsError,
  CancelledError,
  copyOf,
  type HeadraceError,
  NotFoundError,
  ResourceExhaustedError,
  UnavailableError,
} from "../errors.js";
import { Fold } from "../fold.js";
import type { GenerationSpec } from "../gen/headrace/v1/generation_pb.js";
import type { StreamResultResponse } from "../gen/headrace/v1/generation_service_pb.js";
import { choicesOf } from "../options.js";
import type { ServerLoad } from "../results.js";
import { prefixKeys } from "./placement.js";
import type { Pool } from "./pool.js";
import { isLostStream, isWorthARetry, lacksAdapter, noteFailure, within, WRONG_INSTANCE } from "./retries.js";
import { LOAD_INTERVAL_MS, PATIENCE_MS, type Server } from "./servers.js";
import { duplicate, type Link, type OpenOptions, SessionRecord } from "./session_core.js";
import { SessionLinks } from "./session_links.js";

const MOST_LOSSES = 5;
const AGAIN_MS = 1_000;
const FIRST_REATTACH_MS = 100;
const LONGEST_REATTACH_MS = 1_000;
const CLOSE_MS = 5_000;

/** The options of a session's router. */
export interface RouterOptions extends OpenOptions {
  /** For how long a request is sent again for which there is no room. */
  readonly roomTimeoutMs: number;
  /** Whether nothing counts as delivered before a request's end. */
  readonly restarts: boolean;
}

/** The requests of one session. */
export class SessionRouter {
  /** The live requests, by id. */
  readonly records = new Map<string, SessionRecord>();
  readonly #links: SessionLinks;
  readonly #timers = new Set<NodeJS.Timeout>();
  readonly #resumes: boolean;
  readonly #serverChanged = (): void => this.#placeWaiting();
  #closing = false;
  #error: HeadraceError | undefined;
  #onDone: (() => void) | undefined;

  constructor(
    private readonly pool: Pool,
    private readonly options: RouterOptions,
  ) {
    pool.begin();
    this.#resumes = !pool.isOne || (options.leaseMs ?? 0) > 0;
    const open = { ...options, loadIntervalMs: options.loadIntervalMs ?? (pool.isOne ? undefined : LOAD_INTERVAL_MS) };
    this.#links = new SessionLinks(open, {
      received: (link, response) => this.#received(link, response),
      lost: (link, error) => this.#lost(link, error),
      refused: (link, record, error) => this.#refused(link, record, error),
      isLive: (requestId) => this.records.has(requestId),
    });
    pool.listen(this.#serverChanged);
    if (pool.isOne) {
      this.#links.to(pool.one);
    }
  }

  // ---- what the session's user does -----------------------------------------------------------------------------------

  /** Starts a request. */
  add(spec: GenerationSpec): SessionRecord {
    this.#checkOpen();
    spec.requestId ||= randomUUID();
    const record = new SessionRecord(new Fold(spec.requestId, choicesOf(spec)), spec, prefixKeys(spec));
    record.giveUpAt = performance.now() + this.options.roomTimeoutMs;
    this.#register(record);
    this.#place(record);
    this.#flush();
    return record;
  }

  /** Continues a request. It goes to the server that has it; if that is not known, to one after another. */
  attach(fold: Fold): SessionRecord {
    this.#checkOpen();
    const record = new SessionRecord(fold, undefined, undefined);
    if (fold.done) {
      return record;
    }
    this.#register(record);
    record.askUntil = performance.now() + PATIENCE_MS;
    const { servers } = this.pool;
    record.instanceId = this.pool.isOne ? "" : servers.owner(fold.requestId);
    const [owner] = this.pool.isOne ? [this.pool.one] : servers.byInstance(record.instanceId);
    if (owner !== undefined) {
      this.#attachAt(owner, record);
    } else {
      record.instanceId = "";
      this.#askNext(record, new NotFoundError(`no server has request "${record.requestId}"`));
    }
    this.#flush();
    return record;
  }

  /** Asks for a request's end. */
  cancel(record: SessionRecord): void {
    record.cancelled = true;
    if (record.link !== undefined) {
      record.link.core.cancel(record);
    } else if (this.records.get(record.requestId) === record) {
      this.#fail(record, new CancelledError("it was cancelled while it waited for a server"));
    }
    this.#flush();
  }

  /** With credits: lets the server send as many more tokens as these first chunks had. */
  pay(record: SessionRecord, chunks: number): void {
    record.link?.core.pay(record, chunks);
    this.#flush();
  }

  /** With credits: pays for everything that has arrived and will arrive. */
  payAll(record: SessionRecord): void {
    record.unlimited = true;
    this.pay(record, record.fold.chunks.length);
  }

  /** Accepts no more requests; resolves when the live ones have ended and all streams are closed. */
  async close(cancel: boolean): Promise<void> {
    this.#closing = true;
    for (const record of [...this.records.values()]) {
      if (cancel) {
        this.cancel(record);
      }
      this.payAll(record); // a cancelled one, too, ends behind its last token
    }
    const ended = new Promise<void>((resolve) => {
      this.#onDone = resolve;
    });
    this.#flush();
    const isInTime = await within(ended, cancel ? CLOSE_MS : undefined);
    const links = this.#links.all;
    this.#failAll(new UnavailableError("the session was closed"));
    this.#flush();
    const streams = Promise.all(links.map((link) => link.wire.ended));
    if (!isInTime || !(await within(streams, CLOSE_MS))) {
      for (const { wire } of links) {
        wire.cancel();
      }
    }
    await streams;
    this.pool.forget(this.#serverChanged);
    this.#stopTimers();
  }

  #stopTimers(): void {
    for (const timer of this.#timers) {
      clearTimeout(timer);
    }
    this.#timers.clear();
  }

  /** The shortest lease that a server granted; undefined: none has answered yet, or none was asked for. */
  get leaseMs(): number | undefined {
    return this.options.leaseMs === undefined ? undefined : this.#links.leaseMs;
  }

  /** What the servers told last of their loads: the sums, and the fullest cache. */
  get load(): ServerLoad | undefined {
    return this.#links.load;
  }

  // ---- what the servers do --------------------------------------------------------------------------------------------

  #received(link: Link, response: StreamResultResponse): void {
    const { core, server } = link;
    const changed = core.receive(response);
    server.instanceId = response.instanceId || server.instanceId;
    if (response.load !== undefined && core.load !== undefined) {
      server.takeLoad(core.load, this.pool.servers.clock());
    }
    for (const record of changed) {
      if (record.instanceId !== core.instanceId) {
        record.instanceId = core.instanceId; // it lives there
        this.pool.servers.noteOwner(record.requestId, core.instanceId);
      }
      if (record.fold.done) {
        this.#ended(link, record);
      }
    }
    if (core.openError !== undefined) {
      this.#drop(link, core.openError);
    }
    this.#flush();
    for (const record of changed) {
      record.wake();
    }
  }

  /** A stream whose `open` was refused is of no use. */
  #drop(link: Link, error: HeadraceError): void {
    link.wire.cancel();
    this.#lost(link, error);
  }

  #lost(link: Link, error: HeadraceError | undefined): void {
    if (link.core.ended) {
      return;
    }
    const records = link.core.giveUp();
    this.#links.forget(link);
    const broken = error ?? new UnavailableError("the server ended the session before its requests");
    const isLoss = isLostStream(broken);
    const { servers } = this.pool;
    for (const _ of records) {
      servers.over(link.server);
    }
    if (isLoss && !this.#isDone && this.#resumes) {
      this.pool.setAside(link.server, broken); // a server that ends an idle session drains
      this.pool.resolveSoon();
    }
    for (const record of records) {
      record.link = undefined;
      if (record.number !== 0 || !record.attaching || record.lostUntil === 0) {
        record.reattached = record.number = 0; // it may be there: a new loss, with a lease of its own
        record.lostUntil = Math.max(record.lostUntil, performance.now() + (link.core.leaseMs ?? 0));
      }
      if (isLoss && this.#resumes && this.#error === undefined && !this.pool.isClosed) {
        this.#move(link, record, broken);
      } else {
        this.#fail(record, copyOf(broken instanceof CancelledError ? new UnavailableError(broken.message) : broken));
      }
    }
    const isUntouched = isLoss && !link.core.isHeard && records.length === 0; // it never was: the next request opens it
    if ((!this.#resumes && !isUntouched) || this.pool.isClosed) {
      this.#error ??= broken;
    }
    this.#flush();
  }

  #placeWaiting(): void {
    if (this.pool.isClosed) {
      this.#failAll(new UnavailableError("the client was closed"));
      this.#stopTimers();
    }
    for (const record of [...this.records.values()]) {
      if (record.wantsServer) {
        this.#place(record);
      }
    }
    this.#flush();
  }

  // ---- where requests go ----------------------------------------------------------------------------------------------

  /** Sends a request to a server, or has it wait for one. */
  #place(record: SessionRecord, avoid?: Server): void {
    const { servers } = this.pool;
    const bounds = { avoid: new Set(avoid === undefined ? [] : [avoid]), without: record.lacking };
    let server = servers.choose(record.keys, bounds);
    const roomIn = server === undefined ? servers.roomIn(record.lacking) : undefined;
    if (roomIn !== undefined && performance.now() + roomIn > record.giveUpAt) {
      server = servers.choose(record.keys, { ...bounds, evenFull: true });
    }
    if (server !== undefined) {
      servers.begun(server);
      this.#sendTo(server, record);
    } else if (roomIn !== undefined) {
      this.#wait(record, roomIn);
    } else if (!record.wantsServer) {
      record.wantsServer = true;
      record.turn += 1;
      const patience = Math.max(PATIENCE_MS, record.lostUntil - performance.now());
      this.#laterFor(record, patience, () => this.#fail(record, servers.nobody()));
    }
  }

  #sendTo(server: Server, record: SessionRecord): void {
    if (record.spec === undefined) {
      throw new TypeError("a request that another stream started is attached, not sent");
    }
    const link = this.#links.to(server);
    record.link = link;
    record.attaching = record.wantsServer = false;
    record.instanceId = "";
    record.turn += 1;
    link.core.put(record, record.spec);
    if (record.cancelled) {
      link.core.cancel(record);
    }
  }

  /** Places a request after so many milliseconds. */
  #wait(record: SessionRecord, milliseconds: number): void {
    record.wantsServer = false;
    record.turn += 1;
    this.#laterFor(record, milliseconds, () => this.#place(record));
  }

  /** Does something for a request after so many milliseconds, if nothing has come of it by then. */
  #laterFor(record: SessionRecord, milliseconds: number, act: () => void): void {
    const turn = record.turn;
    const timer = setTimeout(() => {
      this.#timers.delete(timer);
      if (record.turn === turn && this.records.get(record.requestId) === record) {
        act();
        this.#flush();
      }
    }, milliseconds);
    this.#timers.add(timer);
  }

  /** A server refused a request; returns the error that ends it, or undefined: it goes on. */
  #refused(link: Link, record: SessionRecord, error: HeadraceError): HeadraceError | undefined {
    record.link = undefined;
    this.pool.servers.over(link.server);
    const failure = this.#afterRefusal(link, record, error);
    if (failure !== undefined) {
      this.records.delete(record.requestId);
    }
    return failure;
  }

  #afterRefusal(link: Link, record: SessionRecord, error: HeadraceError): HeadraceError | undefined {
    if (record.attaching) {
      return this.#notAttached(link, record, error);
    }
    if (record.cancelled && isWorthARetry(error)) {
      return new CancelledError("it was cancelled before a server had room");
    }
    if (error instanceof AlreadyExistsError && record.losses > 0) {
      this.#attachAt(link.server, record); // it had arrived after all
      return undefined;
    }
    if (error instanceof ResourceExhaustedError && error.retryAfterMs !== undefined) {
      return this.#findRoom(link.server, record, error, error.retryAfterMs);
    }
    if (error instanceof UnavailableError && this.#resumes && record.losses < MOST_LOSSES) {
      noteFailure(this.pool, link.server, error);
      this.#sendAgain(record, link.server);
      return undefined;
    }
    if (lacksAdapter(error) && !record.cancelled) {
      record.lacking.add(link.server);
      if (this.pool.servers.roomIn(record.lacking) !== undefined) {
        this.#place(record);
        return undefined;
      }
    }
    return error;
  }

  /** A server has no room for so long: another may have some. */
  #findRoom(
    server: Server,
    record: SessionRecord,
    error: HeadraceError,
    milliseconds: number,
  ): HeadraceError | undefined {
    const { servers, isOne } = this.pool;
    if (!isOne) {
      servers.full(server, milliseconds); // of one server, each request learns it by itself: there may be room for others
    }
    const bounds = { avoid: new Set([server]), without: record.lacking };
    const other = !isOne && servers.budget.failed() ? servers.choose(record.keys, bounds) : undefined;
    if (other !== undefined && other !== server) {
      this.#place(record, server);
      return undefined;
    }
    if (performance.now() + milliseconds > record.giveUpAt) {
      return error;
    }
    this.#wait(record, milliseconds);
    return undefined;
  }

  /** A request's stream was lost, and perhaps its server. */
  #move(link: Link, record: SessionRecord, error: HeadraceError): void {
    const isBegun = record.fold.chunks.length > 0 && !this.options.restarts;
    if (record.spec === undefined || isBegun || record.losses >= MOST_LOSSES) {
      this.#reattach(link, record, error);
      return;
    }
    if (record.cancelled) {
      this.#fail(record, new CancelledError("it was cancelled, and its server was lost"));
      return;
    }
    if ((this.options.leaseMs ?? 0) > 0) {
      this.#links.mayRunOn(link.core.instanceId, record.requestId); // it may run on there
    }
    this.#restart(record);
    this.#sendAgain(record, link.server);
  }

  #restart(record: SessionRecord): void {
    record.fold.restart();
    record.paid = 0;
  }

  /** Sends a request again, elsewhere if there is another server; at once if the budget allows it. */
  #sendAgain(record: SessionRecord, avoid: Server): void {
    record.losses += 1;
    if (this.pool.servers.budget.failed()) {
      this.#place(record, avoid);
    } else {
      this.#wait(record, AGAIN_MS * (0.5 + this.pool.servers.jitter()));
    }
  }

  /** A request has ended, unless its server failed before it had delivered anything. */
  #ended(link: Link, record: SessionRecord): void {
    const { error } = record.fold;
    const { servers } = this.pool;
    if (record.link === link) {
      servers.over(link.server);
    }
    if (error === undefined) {
      servers.budget.succeeded();
    }
    servers.endedAlone(record.requestId);
    if (record.refused || this.records.get(record.requestId) !== record) {
      return;
    }
    record.link = undefined;
    const isLost = error instanceof UnavailableError && record.spec !== undefined && this.#resumes;
    const isDelivered = record.fold.chunks.length > 0 && !this.options.restarts;
    if (isLost && !isDelivered && !record.cancelled && record.losses < MOST_LOSSES) {
      this.#restart(record);
      this.#sendAgain(record, link.server);
      return;
    }
    this.records.delete(record.requestId);
    if (record.losses > 0) {
      this.#links.endedAt(link.core.instanceId, record.requestId);
    }
  }

  // ---- requests that live somewhere -----------------------------------------------------------------------------------

  #attachAt(server: Server, record: SessionRecord): void {
    this.pool.servers.begun(server);
    const link = this.#links.to(server);
    record.link = link;
    record.attaching = true;
    record.turn += 1;
    link.core.putAttached(record, record.instanceId);
  }

  /** Attaches a request again where it lives, until its lease has passed. */
  #reattach(link: Link, record: SessionRecord, error: HeadraceError): void {
    const pause = Math.min(FIRST_REATTACH_MS * 2 ** record.reattached, LONGEST_REATTACH_MS);
    if (record.instanceId === "" || performance.now() + pause > record.lostUntil) {
      this.#fail(record, copyOf(error));
      return;
    }
    record.reattached += 1;
    record.turn += 1;
    this.#laterFor(record, pause, () => this.#attachAt(link.server, record));
  }

  /** A server refused to attach a request. */
  #notAttached(link: Link, record: SessionRecord, error: HeadraceError): HeadraceError | undefined {
    if (record.spec === undefined && record.instanceId === "" && error instanceof NotFoundError && !this.pool.isOne) {
      record.asked.add(link.server);
      this.#askNext(record, error);
      return undefined;
    }
    if (error.reason === WRONG_INSTANCE && !record.asked.has(link.server)) {
      record.asked.add(link.server);
      link.server.instanceId = error.metadata["instance_id"] ?? "";
      const [found] = this.pool.servers.byInstance(record.instanceId);
      if (found !== undefined && record.asked.size === 1) {
        this.#attachAt(found, record); // followed once
        return undefined;
      }
    }
    if (record.spec !== undefined && error instanceof NotFoundError) {
      if (record.fold.chunks.length === 0 && record.losses < MOST_LOSSES) {
        this.#sendAgain(record, link.server);
        return undefined;
      }
      return new UnavailableError("the server that had the request was lost, and it with it", { cause: error });
    }
    return error;
  }

  /** Attaches a request at the next server that may have it. */
  #askNext(record: SessionRecord, error: HeadraceError): void {
    const { servers } = this.pool;
    const next = servers.reachable().find((one) => !record.asked.has(one));
    if (next !== undefined) {
      this.#attachAt(next, record);
    } else if (servers.isSettled || performance.now() > record.askUntil) {
      this.#fail(record, error);
    } else {
      record.turn += 1;
      this.#laterFor(record, FIRST_REATTACH_MS, () => this.#askNext(record, error));
    }
  }

  // ---- housekeeping ---------------------------------------------------------------------------------------------------

  #fail(record: SessionRecord, error: HeadraceError): void {
    record.turn += 1;
    record.wantsServer = false;
    record.fold.fail(error);
    this.records.delete(record.requestId);
    record.wake();
  }

  #failAll(error: HeadraceError): void {
    this.#error ??= error;
    for (const record of [...this.records.values()]) {
      this.#fail(record, copyOf(error));
    }
  }

  get #isDone(): boolean {
    return this.#closing && this.records.size === 0;
  }

  /** Sends what the streams' bookkeeping wants sent. */
  #flush(): void {
    this.#links.flush(this.#isDone);
    if (this.#isDone) {
      this.#onDone?.();
    }
  }

  #register(record: SessionRecord): void {
    if (this.records.has(record.requestId)) {
      throw duplicate(record.requestId);
    }
    this.records.set(record.requestId, record);
  }

  #checkOpen(): void {
    if (this.#error !== undefined) {
      throw copyOf(this.#error);
    }
    if (this.#closing) {
      throw new UnavailableError("the session is being closed; it takes no more requests");
    }
    this.pool.begin();
  }
}
