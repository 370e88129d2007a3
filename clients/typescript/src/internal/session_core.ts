/**
 * The bookkeeping of one stream of a session, without input or output: which commands to send, and which request an
 * answer belongs to.
 *
 * 1. `put`, `putAttached`, `cancel` and `pay` make command messages and remember what they were for. They go to `outbox`;
 *    the stream's wire sends them.
 * 2. The wire passes every message of the server to `receive`, which folds events into their requests' records and
 *    returns the records that changed, to be woken.
 * 3. A refused request is told to `onRefusal`, which decides whether it ends or goes on elsewhere.
 * 4. When the stream ends, `giveUp` lets go of the live requests.
 *
 * @module
 */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";

import { withCapabilities } from "../capabilities.js";
import { AlreadyExistsError, errorFromStatus, type HeadraceError, movedError } from "../errors.js";
import type { Fold } from "../fold.js";
import type { GenerationSpec, ResultEvent } from "../gen/headrace/v1/generation_pb.js";
import {
  type OpenCommandSchema,
  type StreamResultRequest,
  StreamResultRequestSchema,
  type StreamResultResponse,
} from "../gen/headrace/v1/generation_service_pb.js";
import { duration } from "../options.js";
import type { ServerLoad } from "../results.js";
import type { PrefixKeys } from "./placement.js";
import type { Server } from "./servers.js";
import type { Wire } from "./wire.js";

/** One request of a session, and where it is. */
export class SessionRecord {
  /** The request's number on its stream, by which its events name it; 0: not known yet. */
  number = 0;
  cancelled = false;
  /** With credits: whether everything that arrives is paid for at once. */
  unlimited = false;
  /** With credits: how many of the fold's chunks have been paid for. */
  paid = 0;
  /** Until when it is sent again for want of room. */
  giveUpAt = Number.POSITIVE_INFINITY;
  /** Whether it was refused before it had any event. */
  refused = false;
  /** The stream that it is on; undefined: it waits. */
  link: Link | undefined;
  /** Whether it was attached there last, not added. */
  attaching: boolean;
  /** How often it was sent again because its server was lost or not ready. */
  losses = 0;
  /** The process that has it. */
  instanceId = "";
  /** Until when the server that it was lost with may have it: how long its lease is. */
  lostUntil = 0;
  reattached = 0;
  askUntil = 0;
  /** With an unknown owner: who does not have it. */
  readonly asked = new Set<Server>();
  /** Who does not have its adapter. */
  readonly lacking = new Set<Server>();
  /** Whether it waits for a server to be ready. */
  wantsServer = false;
  /** Grows whenever it is sent or begins to wait: an action of an earlier turn is void. */
  turn = 0;
  readonly #waiting = new Set<() => void>();

  constructor(
    readonly fold: Fold,
    /** What to send; undefined: another stream started the request. */
    readonly spec: GenerationSpec | undefined,
    readonly keys: PrefixKeys | undefined,
  ) {
    this.attaching = spec === undefined;
  }

  get requestId(): string {
    return this.fold.requestId;
  }

  /** Calls this once, at the next change. */
  onChange(listener: () => void): void {
    this.#waiting.add(listener);
  }

  /** Calls it no more. */
  offChange(listener: () => void): void {
    this.#waiting.delete(listener);
  }

  /** Wakes who waits for a change. */
  wake(): void {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const listener of waiting) {
      listener();
    }
  }
}

/** The stream to one server. */
export interface Link {
  readonly server: Server;
  readonly core: SessionCore;
  readonly wire: Wire;
}

/** The options that a stream is opened with. */
export interface OpenOptions {
  readonly leaseMs: number | undefined;
  readonly initialCredit: number;
  readonly loadIntervalMs: number | undefined;
}

/** The error for a request whose id is taken on its session. */
export function duplicate(requestId: string): AlreadyExistsError {
  return new AlreadyExistsError(`a request "${requestId}" is live on this session`, { requestId });
}

/** The bookkeeping of one stream. */
export class SessionCore {
  /** The live requests, by id. */
  readonly records = new Map<string, SessionRecord>();
  /** The lease that was granted; undefined: not answered, or not asked for. */
  leaseMs: number | undefined;
  /** What the server told last of its load. */
  load: ServerLoad | undefined;
  /** Whether nothing more is sent or received. */
  ended = false;
  /** Whether no more requests come. */
  closing = false;
  /** Why `open` was refused, if it was. */
  openError: HeadraceError | undefined;
  /** Commands that wait to be sent. */
  outbox: StreamResultRequest[] = [];
  /** The server's process, once it has answered. */
  instanceId = "";
  /** Whether the server has said anything. */
  isHeard = false;
  readonly #credits: boolean;
  readonly #commands = new Map<bigint, SessionRecord>();
  readonly #numbers = new Map<number, SessionRecord>();
  #lastId = 0n;
  #openId = 0n;

  /**
   * @param onRefusal - asked when a request is refused; returns the error that ends it, or undefined: it goes on.
   */
  constructor(
    options: OpenOptions,
    private readonly onRefusal: (record: SessionRecord, error: HeadraceError) => HeadraceError | undefined,
  ) {
    const { leaseMs, initialCredit, loadIntervalMs } = options;
    this.#credits = initialCredit > 0;
    if (leaseMs !== undefined || initialCredit > 0 || loadIntervalMs !== undefined) {
      const open: MessageInitShape<typeof OpenCommandSchema> = {
        initialCredit,
        ...(leaseMs === undefined ? {} : { lease: duration(leaseMs, "leaseMs") }),
        ...(loadIntervalMs === undefined ? {} : { loadInterval: duration(loadIntervalMs, "loadIntervalMs") }),
      };
      this.#openId = this.#nextId();
      this.#send({ commandId: this.#openId, command: { case: "open", value: open } });
    }
  }

  /** Whether nothing is left to send. While a request is live, its credits or a cancel may still be. */
  get hasSaidAll(): boolean {
    return this.ended || (this.closing && this.records.size === 0 && this.outbox.length === 0);
  }

  /** Starts a request. */
  put(record: SessionRecord, spec: GenerationSpec): void {
    this.records.set(record.requestId, record);
    this.#sendFor(record, { case: "add", value: { spec } });
  }

  /** Continues a request, from the event that its fold needs next; `instanceId`: of the process that has it. */
  putAttached(record: SessionRecord, instanceId: string): void {
    this.records.set(record.requestId, record);
    record.paid = record.fold.chunks.length;
    const { requestId, nextSeq: fromSeq } = record.fold;
    this.#sendFor(record, { case: "attach", value: { requestId, fromSeq, instanceId } });
  }

  /** Asks the server to end a request; does nothing if it has ended. */
  cancel(record: SessionRecord): void {
    record.cancelled = true;
    if (this.records.get(record.requestId) === record && !this.ended) {
      this.cancelById(record.requestId, "");
    }
  }

  /** Asks the server to end what it may have of a request. */
  cancelById(requestId: string, instanceId: string): void {
    this.#send({ commandId: this.#nextId(), command: { case: "cancel", value: { requestId, instanceId } } });
  }

  /** With credits: lets the server send as many more tokens as these first chunks of the request had. */
  pay(record: SessionRecord, chunks: number): void {
    if (!this.#credits || this.ended || record.fold.done || this.records.get(record.requestId) !== record) {
      return;
    }
    let tokens = 0;
    for (let index = record.paid; index < chunks; index++) {
      tokens += record.fold.chunks[index]?.tokenIds.length ?? 0;
    }
    record.paid = Math.max(record.paid, chunks);
    if (tokens > 0) {
      const { requestId } = record;
      this.#send({ commandId: this.#nextId(), command: { case: "credit", value: { requestId, tokens } } });
    }
  }

  /** Processes one message of the server; returns the records that changed, each once. */
  receive(response: StreamResultResponse): Set<SessionRecord> {
    const changed = new Set<SessionRecord>();
    this.isHeard = true;
    this.instanceId = response.instanceId || this.instanceId;
    if (response.opened !== undefined) {
      this.leaseMs = response.opened.lease === undefined ? 0 : durationMs(response.opened.lease);
    }
    if (response.load !== undefined) {
      const { running, waiting, kvCacheUsage } = response.load;
      this.load = { running, waiting, kvCacheUsage };
    }
    for (const { commandId, status, requestId } of response.rejections) {
      if (status === undefined) {
        continue;
      }
      if (this.#openId !== 0n && commandId === this.#openId) {
        this.openError = errorFromStatus(status);
        return changed;
      }
      const record = this.#commands.get(commandId);
      if (record !== undefined) {
        this.#commands.delete(commandId);
        this.#refuse(record, errorFromStatus(status, { requestId: requestId || record.requestId }), changed);
      } // else of a cancel or a credit whose request has just ended
    }
    for (const { requestNumber } of response.detached) {
      const record = this.#numbers.get(requestNumber);
      if (record !== undefined) {
        this.#forget(record);
        record.fold.fail(movedError(record.requestId));
        changed.add(record);
      }
    }
    for (const { commandId, requestId, requestNumber } of response.attached) {
      this.#commands.delete(commandId);
      const record = this.records.get(requestId);
      if (record !== undefined) {
        this.#number(record, requestNumber);
        changed.add(record);
      }
    }
    for (const event of response.events) {
      const record = this.#take(event);
      if (record !== undefined) {
        changed.add(record);
      }
    }
    for (const record of changed) {
      if (record.unlimited) {
        this.pay(record, record.fold.chunks.length);
      }
    }
    return changed;
  }

  /** Records the stream's end; lets go of the live requests and returns them, as they are. */
  giveUp(): SessionRecord[] {
    this.ended = true;
    const lost = [...this.records.values()];
    this.records.clear();
    this.#commands.clear();
    this.#numbers.clear();
    this.outbox = [];
    return lost;
  }

  #refuse(record: SessionRecord, error: HeadraceError, changed: Set<SessionRecord>): void {
    this.#forget(record);
    const failure = this.onRefusal(record, error);
    if (failure !== undefined) {
      record.refused = record.fold.nextSeq === 1n;
      record.fold.fail(failure);
      changed.add(record);
    }
  }

  #take(event: ResultEvent): SessionRecord | undefined {
    if (event.event.case === "accepted") {
      this.#commands.delete(event.event.value.commandId);
      const started = this.records.get(event.event.value.requestId);
      if (started !== undefined && started.number === 0) {
        this.#number(started, event.requestNumber);
      }
    }
    const record = this.#numbers.get(event.requestNumber);
    if (record === undefined) {
      return undefined; // of a request that failed here before its last events came
    }
    record.fold.add(event);
    if (record.fold.done) {
      const isBroken = record.fold.error !== undefined && event.event.case !== "failed";
      if (isBroken && record.spec !== undefined) {
        this.cancel(record); // do not let it run for nobody
      }
      this.#forget(record);
    }
    return record;
  }

  #number(record: SessionRecord, number: number): void {
    record.number = number;
    this.#numbers.set(number, record);
  }

  #forget(record: SessionRecord): void {
    if (this.records.get(record.requestId) === record) {
      this.records.delete(record.requestId);
    }
    this.#numbers.delete(record.number);
    record.number = 0;
  }

  #sendFor(record: SessionRecord, command: NonNullable<MessageInitShape<typeof StreamResultRequestSchema>["command"]>) {
    const commandId = this.#nextId();
    this.#commands.set(commandId, record);
    this.#send({ commandId, command });
  }

  #send(init: MessageInitShape<typeof StreamResultRequestSchema>): void {
    const request = create(StreamResultRequestSchema, init);
    this.outbox.push(withCapabilities(StreamResultRequestSchema, request));
  }

  #nextId(): bigint {
    this.#lastId += 1n;
    return this.#lastId;
  }
}
