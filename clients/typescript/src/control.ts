/**
 * What operators do at a client's one server.
 *
 * @module
 */
import { create } from "@bufbuild/protobuf";

import { type CallOptions, type Connection, unary } from "./connection.js";
import {
  LoadAdapterRequestSchema,
  type LoadAdapterResponse,
  UnloadAdapterRequestSchema,
} from "./gen/headrace/v1/control_service_pb.js";
import { duration } from "./options.js";

/** How an adapter is loaded. */
export interface LoadAdapterOptions extends CallOptions {
  /** Whether it stays when others need its memory; default: no. */
  readonly pinned?: boolean | undefined;
  /**
   * Whether it may take the place of a loaded one with this name; default: no. Requests that were accepted before go on
   * with what they began with.
   */
  readonly replace?: boolean | undefined;
}

/** How an adapter is unloaded. */
export interface UnloadAdapterOptions extends CallOptions {
  /** After how many milliseconds requests that have it are cancelled; default: they go on to their end. */
  readonly graceMs?: number | undefined;
}

/** Says which adapters requests may name. Its calls are not made again when they fail. */
export class Control {
  /** @internal */
  constructor(
    private readonly connection: Connection,
    private readonly rpcTimeoutMs: number,
  ) {}

  /**
   * Loads an adapter, and resolves when requests may name it: to the adapter, and to the names of those that had to go
   * because it needed the memory.
   *
   * @param name - what requests will call it.
   * @param source - the name of its directory below the server's `--adapter-root`.
   * @throws AlreadyExistsError - the name is taken.
   * @throws FailedPreconditionError - the adapter cannot be served; the message gives the reason.
   * @throws ResourceExhaustedError - there is no room for it.
   */
  async loadAdapter(name: string, source: string, options: LoadAdapterOptions = {}): Promise<LoadAdapterResponse> {
    const { pinned = false, replace = false, ...call } = options;
    const request = create(LoadAdapterRequestSchema, { name, source, pinned, replace });
    return unary(this.connection, this.#short(call), "", (at, given) => at.control.loadAdapter(request, given));
  }

  /**
   * Unloads an adapter: requests can no longer name it. Resolves to the number of those that have it.
   *
   * @throws NotFoundError - no adapter has this name.
   */
  async unloadAdapter(name: string, options: UnloadAdapterOptions = {}): Promise<number> {
    const { graceMs, ...call } = options;
    const timeout = graceMs === undefined ? {} : { timeout: duration(graceMs, "graceMs") };
    const request = create(UnloadAdapterRequestSchema, { name, ...timeout });
    const { liveRequests } = await unary(this.connection, this.#short(call), "", (at, given) =>
      at.control.unloadAdapter(request, given),
    );
    return Number(liveRequests);
  }

  #short({ signal, timeoutMs }: CallOptions): CallOptions {
    return { signal, timeoutMs: timeoutMs ?? this.rpcTimeoutMs };
  }
}
