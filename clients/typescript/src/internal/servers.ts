/**
 * What a client knows of its servers, and what follows from it; the part that does no input or output. docs/fleet.md
 * tells it in full.
 *
 * 1. `listed` takes the addresses that the targets have now. A new one is joining: the pool asks for its health until it
 *    serves, then `joined` makes it ready.
 * 2. `choose` gives the server for a request among those that are ready. Whoever sends it there says `begun`, and `over`
 *    at its end.
 * 3. A server that cannot be reached, drains or loads is `setAside`: it is joining again. One that has no room is `full`
 *    for as long as it said.
 * 4. An address that is listed no longer is leaving: it gets nothing new, and what runs there goes on.
 * 5. `owner` finds the server that has a request, by the instance that its answer named.
 *
 * A client of one address has one server, which counts as ready until a call or stream was lost there.
 *
 * @module
 */
import type { Connection } from "../connection.js";
import { type HeadraceError, UnavailableError } from "../errors.js";
import type { ServerLoad } from "../results.js";
import { type Address, textOf } from "../targets.js";
import { Placement, type PrefixKeys } from "./placement.js";

/** How long a request waits for a server to be ready. */
export const PATIENCE_MS = 5_000;
/** How long a question for a server's health may take, and the longest pause between two. */
export const CHECK_MS = 2_000;
/** How often sessions ask for their servers' loads. */
export const LOAD_INTERVAL_MS = 1_000;
const LOAD_MS = 5_000; // an older report says nothing any more
const FIRST_CHECK_MS = 100;
const TWIN_MS = 10_000;
const LEFT_MS = 60_000;
const ALONE_MS = 60_000;
const OWNERS = 65_536;
const BUDGET = 100;
const BUDGET_RATIO = 0.1;

/** One server, as the client knows it. */
export class Server {
  /** What it is good for: `leaving` is listed no longer, and what runs there goes on. */
  state: "joining" | "ready" | "leaving" = "joining";
  /** Its process; empty: not known (yet). */
  instanceId = "";
  /** How many requests it runs at a time. */
  capacity = 1;
  /** How many requests of this client it has. */
  outstanding = 0;
  /** Until when it has no room, as it said. */
  fullUntil = 0;
  checkAt: number;
  usedAt: number;
  /** When it was chosen last. */
  turn = 0;
  /** Why it is not ready. */
  problem: HeadraceError | undefined;
  /** Whether it has answered for its health, or failed to. */
  isKnown = false;
  #checks = 0;
  #others = 0;
  #othersUntil = 0;

  constructor(
    readonly address: Address,
    readonly connection: Connection,
    now: number,
  ) {
    this.checkAt = this.usedAt = now;
  }

  /** What all clients know it by; its address, as long as its instance is not known. */
  get name(): string {
    return this.instanceId || textOf(this.address);
  }

  /** Notes what it told of its load: what is not this client's own. */
  takeLoad(load: ServerLoad, now: number): void {
    this.#others = Math.max(load.running + load.waiting - this.outstanding, 0);
    this.#othersUntil = now + LOAD_MS;
  }

  /** How many requests it has, as far as this client knows. */
  load(now: number): number {
    return this.outstanding + (now < this.#othersUntil ? this.#others : 0);
  }

  /** Puts off the next question for its health: 0.1 s, then twice as long each time. */
  waitForCheck(now: number): void {
    this.checkAt = now + Math.min(FIRST_CHECK_MS * 2 ** this.#checks, CHECK_MS);
    this.#checks = Math.min(this.#checks + 1, 10);
  }

  /** Its health was good. */
  foundReady(): void {
    this.state = "ready";
    this.problem = undefined;
    this.#checks = 0;
  }
}

/**
 * Whether what failed may be sent again at once: a bucket of tokens, as gRPC throttles retries (gRFC A6). A failure takes
 * a token, a success gives back a tenth of one; while the bucket is at most half full, nothing is sent again at once.
 */
export class RetryBudget {
  #tokens = BUDGET;

  /** Notes a failure; whether there may be another try at once. */
  failed(): boolean {
    this.#tokens = Math.max(this.#tokens - 1, 0);
    return this.#tokens > BUDGET / 2;
  }

  /** Notes a success. */
  succeeded(): void {
    this.#tokens = Math.min(this.#tokens + BUDGET_RATIO, BUDGET);
  }
}

/** What bounds the choice of a server. */
interface Bounds {
  readonly avoid?: ReadonlySet<Server>;
  readonly without?: ReadonlySet<Server>;
  readonly evenFull?: boolean;
}

const NONE: ReadonlySet<Server> = new Set();

/** The servers of one client. Times are in milliseconds, by `clock`. */
export class Servers {
  readonly all = new Map<string, Server>();
  readonly budget = new RetryBudget();
  /** Why a name could not be looked up, the last time that it could not. */
  unresolved = "";
  readonly #placement = new Placement();
  readonly #owners = new Map<string, string>();
  readonly #alone = new Map<string, { server: Server; until: number }>();
  #turn = 0;

  constructor(
    readonly clock: () => number = () => performance.now(),
    /** From 0 to 1: what spreads tries that would come at the same time. */
    readonly jitter: () => number = Math.random,
  ) {}

  /** Takes the addresses that there are now; `make` connects to those that are new. */
  listed(addresses: readonly Address[], make: (address: Address) => Connection): void {
    const now = this.clock();
    const wanted = new Map(addresses.map((address) => [textOf(address), address]));
    for (const [name, address] of wanted) {
      const server = this.all.get(name);
      if (server === undefined) {
        this.all.set(name, new Server(address, make(address), now));
      } else if (server.state === "leaving") {
        server.state = "joining";
        server.checkAt = now;
      }
    }
    for (const [name, server] of this.all) {
      if (!wanted.has(name)) {
        server.state = "leaving";
      }
    }
  }

  /** Forgets the servers that left and have nothing to do; returns them, to be closed. */
  left(): Server[] {
    const before = this.clock() - LEFT_MS;
    const gone = [...this.all].filter(
      ([, one]) => one.state === "leaving" && one.outstanding === 0 && one.usedAt < before,
    );
    for (const [name] of gone) {
      this.all.delete(name);
    }
    return gone.map(([, server]) => server);
  }

  /** The servers whose health is to be asked for now. */
  dueForCheck(): Server[] {
    const now = this.clock();
    return this.#in("joining").filter((one) => one.checkAt <= now);
  }

  /** In how many milliseconds the next one is due; undefined: none is. */
  nextCheck(): number | undefined {
    const joining = this.#in("joining");
    return joining.length === 0
      ? undefined
      : Math.max(Math.min(...joining.map((one) => one.checkAt)) - this.clock(), 0);
  }

  /** A server is ready; it told its instance and its capacity. If it is known by another address, this one is not used. */
  joined(server: Server, instanceId: string, capacity: number): void {
    server.instanceId = instanceId || server.instanceId;
    server.capacity = Math.max(capacity, 1);
    server.isKnown = true;
    if (server.state !== "joining") {
      return;
    }
    const twins = this.byInstance(server.instanceId).filter((one) => one !== server);
    if (twins.some((one) => one.state === "ready")) {
      server.checkAt = this.clock() + TWIN_MS;
    } else {
      server.foundReady();
    }
  }

  /** A server was asked, and is not ready. */
  notJoined(server: Server, problem: HeadraceError): void {
    server.problem = problem;
    server.isKnown = true;
    server.waitForCheck(this.clock());
  }

  /** A server cannot be reached, or is not ready: it gets nothing new until it is. */
  setAside(server: Server, problem: HeadraceError): void {
    server.problem = problem;
    if (server.state === "leaving") {
      return;
    }
    server.state = "joining";
    server.waitForCheck(this.clock());
    for (const twin of this.byInstance(server.instanceId)) {
      if (twin.state === "joining" && twin !== server) {
        twin.checkAt = this.clock();
      }
    }
  }

  /** A server has no room for so long. */
  full(server: Server, milliseconds: number): void {
    server.fullUntil = Math.max(server.fullUntil, this.clock() + milliseconds);
  }

  /**
   * The server for a request; undefined: no server is ready and has room.
   *
   * @param bounds.avoid - servers that shall not have it, unless there is no other.
   * @param bounds.without - servers that cannot have it, because they lack what it needs.
   * @param bounds.evenFull - whether a server that said that it has no room may have it, if all did.
   */
  choose(
    keys: PrefixKeys | undefined,
    { avoid = NONE, without = NONE, evenFull = false }: Bounds = {},
  ): Server | undefined {
    const now = this.clock();
    for (const [id, { until }] of this.#alone) {
      if (until >= now) {
        break;
      }
      this.endedAlone(id);
    }
    const ready = this.#in("ready", without);
    const roomy = ready.filter((one) => one.fullUntil <= now);
    let from = orAll(roomy, avoid);
    if (from.length === 0 && evenFull) {
      from = orAll(ready, avoid);
    }
    if (from.length <= 1) {
      return from[0];
    }
    const byName = new Map(from.map((one) => [one.name, one]));
    const candidates = [...byName].map(([name, one]) => ({
      name,
      load: one.load(now),
      capacity: one.capacity,
      turn: one.turn,
    }));
    return byName.get(this.#placement.choose(keys, candidates));
  }

  /** In how many milliseconds a ready server has room, as these said; undefined: none is ready but those `without`. */
  roomIn(without: ReadonlySet<Server> = NONE): number | undefined {
    const ready = this.#in("ready", without);
    return ready.length === 0 ? undefined : Math.max(Math.min(...ready.map((s) => s.fullUntil)) - this.clock(), 0);
  }

  /** A request goes to a server. */
  begun(server: Server): void {
    this.#turn += 1;
    server.turn = this.#turn;
    server.outstanding += 1;
    server.usedAt = this.clock();
  }

  /** A request there has ended, or goes elsewhere. */
  over(server: Server): void {
    server.outstanding -= 1;
    server.usedAt = this.clock();
  }

  /** A request goes on without a call. It counts as the server's load until it is seen to have ended, or for a minute. */
  runsAlone(requestId: string, server: Server): void {
    this.endedAlone(requestId);
    this.#alone.set(requestId, { server, until: this.clock() + ALONE_MS });
    this.begun(server);
  }

  /** The end of such a request was seen. */
  endedAlone(requestId: string): void {
    const found = this.#alone.get(requestId);
    if (found !== undefined) {
      this.#alone.delete(requestId);
      this.over(found.server);
    }
  }

  /** An answer named the instance that has a request. */
  noteOwner(requestId: string, instanceId: string): void {
    if (instanceId === "") {
      return;
    }
    this.#owners.delete(requestId);
    this.#owners.set(requestId, instanceId);
    if (this.#owners.size > OWNERS) {
      for (const oldest of this.#owners.keys()) {
        this.#owners.delete(oldest);
        break;
      }
    }
  }

  /** The instance that has a request; empty: not known. */
  owner(requestId: string): string {
    return this.#owners.get(requestId) ?? "";
  }

  /** The servers that are this instance: the ready ones first. */
  byInstance(instanceId: string): Server[] {
    const found = [...this.all.values()].filter((one) => instanceId !== "" && one.instanceId === instanceId);
    return [...found.filter((one) => one.state === "ready"), ...found.filter((one) => one.state !== "ready")];
  }

  /** Whether all servers have been asked whether they are ready: what none of them has is nowhere. */
  get isSettled(): boolean {
    return this.all.size > 0 && [...this.all.values()].every((one) => one.isKnown);
  }

  /** All servers that may answer for what they have: those that are ready or leave. */
  reachable(): Server[] {
    return [...this.all.values()].filter((one) => one.state !== "joining");
  }

  /** The error for a request that found no server. */
  nobody(): UnavailableError {
    const problems = [...this.all.values()].flatMap((one) => (one.problem === undefined ? [] : [one.problem]));
    const told = [...new Set(problems.map((one) => one.message))].join("; ") || this.unresolved || "no answer yet";
    const one = problems[0];
    return new UnavailableError(`none of ${this.all.size} servers is ready: ${told}`, {
      cause: one,
      status: one === undefined || one.reason === "" ? undefined : one.status,
    });
  }

  #in(state: Server["state"], without: ReadonlySet<Server> = NONE): Server[] {
    return [...this.all.values()].filter((one) => one.state === state && !without.has(one));
  }
}

function orAll(servers: readonly Server[], avoid: ReadonlySet<Server>): readonly Server[] {
  const rest = servers.filter((one) => !avoid.has(one));
  return rest.length > 0 ? rest : servers;
}
