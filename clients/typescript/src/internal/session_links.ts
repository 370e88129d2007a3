/**
 * The streams of one session: one to each server that has requests of it, opened when it gets its first.
 *
 * @module
 */
import { AsyncResource } from "node:async_hooks";

import type { HeadraceError } from "../errors.js";
import type { StreamResultResponse } from "../gen/headrace/v1/generation_service_pb.js";
import type { ServerLoad } from "../results.js";
import type { Server } from "./servers.js";
import { type Link, type OpenOptions, SessionCore, type SessionRecord } from "./session_core.js";
import { Wire } from "./wire.js";

/** What the streams tell. */
export interface LinkListener {
  /** A message came. */
  received(link: Link, response: StreamResultResponse): void;
  /** The stream has ended; undefined: in order. */
  lost(link: Link, error: HeadraceError | undefined): void;
  /** A request was refused; returns the error that ends it, or undefined: it goes on. */
  refused(link: Link, record: SessionRecord, error: HeadraceError): HeadraceError | undefined;
  /** Whether a request of this id has not ended. */
  isLive(requestId: string): boolean;
}

/** The open streams of one session. */
export class SessionLinks {
  readonly #links = new Map<Server, Link>();
  /** By instance: what was sent elsewhere since. */
  readonly #orphans = new Map<string, Set<string>>();
  /** Every stream has the asynchronous context in which the session was opened, and so its trace. */
  readonly #scope = new AsyncResource("HeadraceSession");

  constructor(
    private readonly options: OpenOptions,
    private readonly listener: LinkListener,
  ) {}

  /** The open ones. */
  get all(): Link[] {
    return [...this.#links.values()];
  }

  /** The stream to a server; opened if there is none. */
  to(server: Server): Link {
    const found = this.#links.get(server);
    if (found !== undefined) {
      return found;
    }
    const { listener } = this;
    const core: SessionCore = new SessionCore(this.options, (record, error) => listener.refused(link, record, error));
    const wire = this.#scope.runInAsyncScope(
      () =>
        new Wire(server.connection, {
          received: (response) => listener.received(link, response),
          lost: (error) => listener.lost(link, error),
        }),
    );
    const link: Link = { server, core, wire };
    this.#links.set(server, link);
    this.#endOrphans(link);
    return link;
  }

  /** Forgets a stream that has ended. */
  forget(link: Link): void {
    if (this.#links.get(link.server) === link) {
      this.#links.delete(link.server);
    }
  }

  /** Sends what the streams' bookkeeping wants sent; `isLast`: no request is left, and none will come. */
  flush(isLast: boolean): void {
    for (const { core, wire } of this.#links.values()) {
      core.closing ||= isLast;
      const commands = core.outbox;
      core.outbox = [];
      if (commands.length > 0 || core.hasSaidAll) {
        wire.send(commands, core.hasSaidAll);
      }
    }
  }

  /** The shortest lease that a server granted; undefined: none has answered yet. */
  get leaseMs(): number | undefined {
    const found = this.all.flatMap(({ core }) => (core.leaseMs === undefined ? [] : [core.leaseMs]));
    return found.length === 0 ? undefined : Math.min(...found);
  }

  /** What the servers told last of their loads: the sums, and the fullest cache. */
  get load(): ServerLoad | undefined {
    const loads = this.all.flatMap(({ core }) => (core.load === undefined ? [] : [core.load]));
    return loads.length === 0
      ? undefined
      : {
          running: loads.reduce((sum, one) => sum + one.running, 0),
          waiting: loads.reduce((sum, one) => sum + one.waiting, 0),
          kvCacheUsage: Math.max(...loads.map((one) => one.kvCacheUsage)),
        };
  }

  /** A request is sent elsewhere, and may run on at this instance. */
  mayRunOn(instanceId: string, requestId: string): void {
    this.#orphansOf(instanceId).add(requestId);
  }

  /** A request that was sent more than once has ended at this instance: at the others nobody waits for it. */
  endedAt(instanceId: string, requestId: string): void {
    this.#orphansOf(instanceId).delete(requestId);
    for (const link of this.#links.values()) {
      this.#endOrphans(link);
    }
  }

  /** Cancels what runs at a server for nobody: its request has ended elsewhere. What still lives may come back. */
  #endOrphans({ core, server }: Link): void {
    const orphans = this.#orphansOf(server.instanceId);
    for (const requestId of [...orphans].filter((one) => !this.listener.isLive(one))) {
      orphans.delete(requestId);
      core.cancelById(requestId, server.instanceId);
    }
  }

  #orphansOf(instanceId: string): Set<string> {
    const found = this.#orphans.get(instanceId) ?? new Set();
    this.#orphans.set(instanceId, found);
    return found;
  }
}
