/**
 * The connections to a client's servers: which there are (names are looked up again and again), and which of them are
 * ready (their health is asked for until they serve).
 *
 * Nothing runs before the first call, and no timer of this module keeps the process alive.
 *
 * @module
 */
import { lookup } from "node:dns/promises";

import { type CallOptions, Connection, type ConnectionSettings, unary } from "../connection.js";
import { errorFromCall, type HeadraceError, UnavailableError } from "../errors.js";
import { HealthCheckResponse_ServingStatus as ServingStatus } from "../gen/grpc/health/v1/health_pb.js";
import type { Address, Name, Place } from "../targets.js";
import { CHECK_MS, type Server, Servers } from "./servers.js";

/** The service whose health says whether requests are served. */
export const GENERATION_SERVICE = "headrace.v1.GenerationService";
const GRACE_MS = 100;
const RESOLVE_MS = 3_000;
const RESOLVE_AGAIN_MS = 500;

/** The servers of one client, and the connections to them. */
export class Pool {
  readonly servers = new Servers();
  /** Whether the client has one address: no health is asked for before something was lost there. */
  readonly isOne: boolean;
  isClosed = false;
  readonly #names: readonly Name[];
  readonly #addresses: readonly Address[];
  readonly #listeners = new Set<() => void>();
  readonly #closing = new AbortController();
  #checkTimer: NodeJS.Timeout | undefined;
  #resolveTimer: NodeJS.Timeout | undefined;
  #resolvedAt = Number.NEGATIVE_INFINITY;
  #found: Address[] = [];
  #resolving: Promise<void> | undefined;
  #isBegun = false;

  constructor(
    places: readonly Place[],
    private readonly settings: ConnectionSettings,
  ) {
    this.#names = places.filter((place) => place.kind === "name");
    this.#addresses = places.filter((place) => place.kind !== "name");
    this.isOne = this.#names.length === 0 && this.#addresses.length === 1;
    if (this.isOne) {
      this.#list([]);
      this.one.foundReady();
    }
  }

  /** The server of a client that has one. */
  get one(): Server {
    for (const server of this.servers.all.values()) {
      return server;
    }
    throw new UnavailableError("the client has no server");
  }

  /** Looks for servers, if that has not begun. Throws if the client is closed. */
  begin(): void {
    if (this.isClosed) {
      throw new UnavailableError("the client is closed");
    }
    if (this.#isBegun || this.isOne) {
      return;
    }
    this.#isBegun = true;
    if (this.#names.length === 0) {
      this.#list([]);
    } else {
      void this.#resolve();
    }
    this.look();
  }

  /** Calls this whenever a server may have become usable. */
  listen(listener: () => void): void {
    this.#listeners.add(listener);
  }

  /** Calls it no more. */
  forget(listener: () => void): void {
    this.#listeners.delete(listener);
  }

  /** Resolves when a server may have become usable, or after so many milliseconds; rejects if the signal is aborted. */
  async changed(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
    await new Promise<void>((resolve) => {
      const done = (): void => {
        clearTimeout(timer);
        this.forget(done);
        signal?.removeEventListener("abort", done);
        this.#closing.signal.removeEventListener("abort", done);
        resolve();
      };
      const timer = setTimeout(done, milliseconds);
      this.listen(done);
      signal?.addEventListener("abort", done);
      this.#closing.signal.addEventListener("abort", done);
      if (signal?.aborted || this.isClosed) {
        done();
      }
    });
  }

  /** Asks for the health of the servers that are due, and comes back for the others. */
  look(): void {
    if (this.isClosed) {
      return;
    }
    const due = this.servers.dueForCheck();
    for (const server of due) {
      server.checkAt = Number.POSITIVE_INFINITY; // until it has answered
    }
    if (due.length > 0) {
      void this.#check(due);
    }
    for (const server of this.servers.left()) {
      server.connection.close();
    }
    clearTimeout(this.#checkTimer);
    const next = this.servers.nextCheck();
    if (next !== undefined && Number.isFinite(next)) {
      this.#checkTimer = setTimeout(() => this.look(), next).unref();
    }
  }

  /** A server failed: it is set aside, and asked for its health. */
  setAside(server: Server, error: HeadraceError): void {
    this.servers.setAside(server, error);
    this.look();
  }

  /** Closes all connections; what runs on them is cancelled. */
  close(): void {
    this.isClosed = true;
    clearTimeout(this.#checkTimer);
    clearTimeout(this.#resolveTimer);
    this.#closing.abort();
    for (const server of this.servers.all.values()) {
      server.connection.close();
    }
    this.#tell();
  }

  /**
   * Asks these servers, and tells who waits when all have answered, or shortly after the first one is ready: what waits
   * is then spread over those that are.
   */
  async #check(due: readonly Server[]): Promise<void> {
    let answers: (() => void)[] = [];
    let timer: NodeJS.Timeout | undefined;
    const tell = (): void => {
      clearTimeout(timer);
      timer = undefined;
      const known = answers;
      answers = [];
      if (known.length > 0 && !this.isClosed) {
        known.forEach((answer) => answer());
        this.look();
        this.#tell();
      }
    };
    const ask = async (server: Server): Promise<void> => {
      const answer = await this.#ask(server);
      answers.push(answer);
      timer ??= setTimeout(tell, GRACE_MS).unref();
    };
    await Promise.all(due.map(ask));
    tell();
  }

  /** Asks a server for its health; returns how its answer is noted. */
  async #ask(server: Server): Promise<() => void> {
    const options: CallOptions = { timeoutMs: CHECK_MS, signal: this.#closing.signal };
    try {
      const health = await unary(server.connection, options, "", (at, given) =>
        at.health.check({ service: GENERATION_SERVICE }, given),
      );
      if (health.status !== ServingStatus.SERVING) {
        throw new UnavailableError(`${server.connection.target} is not ready`);
      }
      const { model } = await unary(server.connection, options, "", (at, given) => at.models.getModel({}, given));
      return () => this.servers.joined(server, model?.instanceId ?? "", model?.limits?.maxRunningRequests ?? 1);
    } catch (failure) {
      const problem = errorFromCall(failure, { target: server.connection.target });
      return () => this.servers.notJoined(server, problem);
    }
  }

  async #resolve(): Promise<void> {
    this.#resolving ??= this.#lookUp();
    await this.#resolving;
    this.#resolving = undefined;
  }

  /** Looks the names up, now and every few seconds; one that cannot be looked up keeps the addresses that it had. */
  async #lookUp(): Promise<void> {
    this.#resolvedAt = performance.now();
    try {
      const found = await Promise.all(this.#names.map(addressesOf));
      this.#found = found.flat();
      this.servers.unresolved = "";
    } catch (error) {
      this.servers.unresolved = `a name cannot be looked up: ${error instanceof Error ? error.message : String(error)}`;
    }
    if (this.isClosed) {
      return;
    }
    this.#list(this.#found);
    this.look();
    this.#tell();
    this.#resolveIn(this.servers.unresolved === "" ? RESOLVE_MS : RESOLVE_AGAIN_MS);
  }

  /** Looks names up again soon: a server was lost, and another may be there. */
  resolveSoon(): void {
    if (this.#names.length > 0 && this.#isBegun && !this.isClosed && this.#resolving === undefined) {
      this.#resolveIn(Math.max(this.#resolvedAt + RESOLVE_AGAIN_MS - performance.now(), 0));
    }
  }

  #resolveIn(milliseconds: number): void {
    clearTimeout(this.#resolveTimer);
    this.#resolveTimer = setTimeout(() => void this.#resolve(), milliseconds).unref();
  }

  #list(found: readonly Address[]): void {
    this.servers.listed([...this.#addresses, ...found], (address) => new Connection(address, this.settings));
  }

  #tell(): void {
    for (const listener of [...this.#listeners]) {
      listener();
    }
  }
}

async function addressesOf({ host, port }: Name): Promise<Address[]> {
  const found = await lookup(host, { all: true });
  return found.map(({ address }) => ({ kind: "tcp", host: address, port, serverName: host }));
}
