/**
 * How a client's options become the connection to one server: its address, encryption, token, keepalive and sizes.
 *
 * Every call passes through interceptors: the innermost adds the token, the metadata and the trace's context; the user's
 * own are around it.
 *
 * @module
 */
import { readFileSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { connect as connectSocket, isIP, type Socket } from "node:net";
import { connect as connectTls, type ConnectionOptions as TlsConnectionOptions } from "node:tls";

import { type Client as Stub, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { errorFromCall, invalidArgument, UnavailableError } from "./errors.js";
import { Health } from "./gen/grpc/health/v1/health_pb.js";
import { ControlService } from "./gen/headrace/v1/control_service_pb.js";
import { GenerationService } from "./gen/headrace/v1/generation_service_pb.js";
import { ModelService } from "./gen/headrace/v1/model_service_pb.js";
import { traceContext } from "./trace.js";
import { VERSION } from "./version.js";
import { type Address, isLocal, type Place, textOf } from "./targets.js";

const DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024;
const DEFAULT_KEEPALIVE_MS = 45_000;
const KEEPALIVE_TIMEOUT_MS = 20_000;
// What a server may send ahead, of one call and in all. Node's 64 KiB for a whole connection are full several times for
// each step of a few hundred requests, and the server waits each time.
const STREAM_WINDOW_BYTES = 1024 * 1024;
const CONNECTION_WINDOW_BYTES = 4 * 1024 * 1024;

/** How a connection is encrypted. Certificates and keys are PEM: text, bytes, or the name of a file. */
export interface TlsOptions {
  /** The authorities that the server's certificate is checked by; default: the system's. */
  readonly ca?: string | Uint8Array | undefined;
  /** The file that has them. */
  readonly caFile?: string | undefined;
  /** This client's own certificate; goes with a key. */
  readonly cert?: string | Uint8Array | undefined;
  /** The file that has it. */
  readonly certFile?: string | undefined;
  /** The key of the certificate. */
  readonly key?: string | Uint8Array | undefined;
  /** The file that has it. */
  readonly keyFile?: string | undefined;
  /** The name that the server's certificate has, if it is not the target's. */
  readonly serverName?: string | undefined;
}

/** Metadata that is sent with a call. Binary values go under names that end in `-bin`, as base64. */
export type Metadata = Readonly<Record<string, string>>;

/** How a client connects. */
export interface ConnectionOptions {
  /**
   * Whether and how the connection is encrypted: `true` for the system's authorities, or more. Default: plaintext; with a
   * token, plaintext to another machine is refused unless this is `false`.
   */
  readonly tls?: boolean | TlsOptions | undefined;
  /** The token that the server knows the caller by; a function is called for each call. */
  readonly token?: string | (() => string | Promise<string>) | undefined;
  /** The file that has the token; it is read again for each call, so that it may be replaced. */
  readonly tokenFile?: string | undefined;
  /** Sent with each call; a function is called for each one, in its asynchronous context. */
  readonly metadata?: Metadata | (() => Metadata | Promise<Metadata>) | undefined;
  /** Interceptors of `@connectrpc/connect` around every call, the first one outermost. */
  readonly interceptors?: readonly Interceptor[] | undefined;
  /** How often a connection with open calls is asked whether it is alive, in milliseconds; default 45,000. 0: never. */
  readonly keepaliveMs?: number | undefined;
  /** The largest message that is sent or received, in bytes; default 16 MiB. */
  readonly maxMessageBytes?: number | undefined;
}

/** The connection to one server, and its stubs. It connects at its first call, and again when it was lost. */
export class Connection {
  /** The server, for messages. */
  readonly target: string;
  readonly generation: Stub<typeof GenerationService>;
  readonly models: Stub<typeof ModelService>;
  readonly control: Stub<typeof ControlService>;
  readonly health: Stub<typeof Health>;
  readonly #manager: SessionManager;
  readonly #sockets = new Set<Socket>();
  #isClosed = false;

  constructor(address: Address, options: ConnectionSettings) {
    this.target = textOf(address);
    const { tls, keepaliveMs } = options;
    const host = address.host.includes(":") ? `[${address.host}]` : address.host;
    const baseUrl = `${tls === undefined ? "http" : "https"}://${address.kind === "unix" ? "localhost" : `${host}:${address.port}`}`;
    const serverName = tls?.servername ?? address.serverName;
    const open = (): Socket => {
      const at = address.kind === "unix" ? { path: address.host } : { host: address.host, port: address.port };
      const named = { servername: serverName || (isIP(address.host) === 0 ? address.host : "") };
      return tls === undefined ? connectSocket(at) : connectTls({ ...at, ...tls, ...named, ALPNProtocols: ["h2"] });
    };
    this.#manager = new SessionManager(
      baseUrl,
      keepaliveMs === 0
        ? {}
        : { pingIntervalMs: keepaliveMs, pingTimeoutMs: KEEPALIVE_TIMEOUT_MS, pingIdleConnection: false },
      {
        settings: { initialWindowSize: STREAM_WINDOW_BYTES },
        createConnection: () => {
          const socket = open().setNoDelay(true);
          socket.on("error", ignore); // the HTTP/2 session tells it; one that comes later concerns nobody
          this.#sockets.add(socket);
          socket.once("close", () => this.#sockets.delete(socket));
          return socket;
        },
      },
    );
    // A call that was begun before would open a connection again.
    const refuseWhenClosed: Interceptor = (next) => (request) => {
      if (this.#isClosed) {
        throw new UnavailableError("the client is closed");
      }
      return next(request);
    };
    const transport = createGrpcTransport({
      baseUrl,
      sessionManager: this.#manager,
      readMaxBytes: options.maxMessageBytes,
      writeMaxBytes: options.maxMessageBytes,
      interceptors: [...options.interceptors, options.addMetadata, refuseWhenClosed],
    });
    this.generation = createClient(GenerationService, transport);
    this.models = createClient(ModelService, transport);
    this.control = createClient(ControlService, transport);
    this.health = createClient(Health, transport);
  }

  /** Closes the connection; calls that still run on it are cancelled. */
  close(): void {
    this.#isClosed = true;
    this.#manager.abort();
    // Else it says GOAWAY with an error code, which a server would log for each client.
    for (const socket of this.#sockets) {
      socket.destroy();
    }
  }
}

/**
 * A session that fails tells it after its streams have; by then the manager may have let go of it, for another one or
 * because it was closed. An error that nobody listens to would end the process. Its first stream is also when its window
 * can be set: there is no option for that.
 */
class SessionManager extends Http2SessionManager {
  override async request(...args: Parameters<Http2SessionManager["request"]>) {
    const stream = await super.request(...args);
    if (stream.session?.listeners("error").includes(ignore) === false) {
      stream.session.on("error", ignore);
      stream.session.setLocalWindowSize(CONNECTION_WINDOW_BYTES);
    }
    return stream;
  }
}

function ignore(): void {}

/** What all connections of a client share. */
export interface ConnectionSettings {
  readonly tls: TlsConnectionOptions | undefined;
  readonly keepaliveMs: number;
  readonly maxMessageBytes: number;
  readonly interceptors: readonly Interceptor[];
  readonly addMetadata: Interceptor;
}

/**
 * Checks a client's options and converts them.
 *
 * @throws InvalidArgumentError - they contradict each other.
 */
export function settingsFrom(options: ConnectionOptions, places: readonly Place[]): ConnectionSettings {
  const { token, tokenFile } = options;
  if (token !== undefined && tokenFile !== undefined) {
    throw invalidArgument("tokenFile", "cannot be combined with token");
  }
  const hasToken = token !== undefined || tokenFile !== undefined;
  const tls = tlsFrom(options.tls);
  if (tls !== undefined && places.some((place) => place.kind === "unix")) {
    throw invalidArgument("tls", "cannot be used with a Unix socket");
  }
  if (hasToken && options.tls === undefined && !places.every(isLocal)) {
    const shown = places.map(textOf).join(",");
    throw invalidArgument(
      "token",
      `would travel to ${shown} in clear text: set tls to true, or to false to accept that`,
    );
  }
  return {
    tls,
    keepaliveMs: positive(options.keepaliveMs ?? DEFAULT_KEEPALIVE_MS, "keepaliveMs", 0),
    maxMessageBytes: positive(options.maxMessageBytes ?? DEFAULT_MAX_MESSAGE_BYTES, "maxMessageBytes", 1),
    interceptors: options.interceptors ?? [],
    addMetadata: metadataInterceptor(options),
  };
}

/** A number of at least `least`, or the error that names the option. */
export function positive(value: number, name: string, least: number): number {
  if (typeof value !== "number" || !(value >= least)) {
    throw invalidArgument(name, `is ${String(value)}; a number of at least ${least} is needed`);
  }
  return value;
}

function tlsFrom(given: boolean | TlsOptions | undefined): TlsConnectionOptions | undefined {
  if (given === undefined || given === false) {
    return undefined;
  }
  const options = given === true ? {} : given;
  const { serverName } = options;
  const [ca, cert, key] = [pem(options, "ca"), pem(options, "cert"), pem(options, "key")];
  if ((cert === undefined) !== (key === undefined)) {
    throw invalidArgument("tls", "a certificate and its key go together");
  }
  return {
    ...(ca === undefined ? {} : { ca }),
    ...(cert === undefined ? {} : { cert }),
    ...(key === undefined ? {} : { key }),
    ...(serverName === undefined ? {} : { servername: serverName }),
  };
}

function pem(options: TlsOptions, name: "ca" | "cert" | "key"): string | Buffer | undefined {
  const value = options[name];
  const file = options[`${name}File`];
  if (value !== undefined && file !== undefined) {
    throw invalidArgument("tls", `${name} cannot be combined with ${name}File`);
  }
  if (file !== undefined) {
    try {
      return readFileSync(file);
    } catch (error) {
      throw invalidArgument("tls", `${name}File cannot be read: ${messageOf(error)}`);
    }
  }
  return value instanceof Uint8Array ? Buffer.from(value) : value;
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function metadataInterceptor({ token, tokenFile, metadata }: ConnectionOptions): Interceptor {
  return (next) => async (request) => {
    request.header.set("user-agent", `headrace-typescript/${VERSION}`);
    for (const [name, value] of traceContext()) {
      request.header.set(name, value);
    }
    const given = typeof metadata === "function" ? await metadata() : metadata;
    for (const [name, value] of Object.entries(given ?? {})) {
      request.header.set(name, value);
    }
    const secret = tokenFile === undefined ? token : (await readTokenFile(tokenFile)).trim();
    const text = typeof secret === "function" ? await secret() : secret;
    if (text !== undefined) {
      request.header.set("authorization", `Bearer ${text}`);
    }
    return next(request);
  };
}

async function readTokenFile(path: string): Promise<string> {
  try {
    return await readFile(path, "utf8");
  } catch (error) {
    throw invalidArgument("tokenFile", `cannot be read: ${messageOf(error)}`);
  }
}

/** The options of one unary call. */
export interface CallOptions {
  /** Ends the call when it is aborted. */
  readonly signal?: AbortSignal | undefined;
  /** The most milliseconds that the call may take. */
  readonly timeoutMs?: number | undefined;
}

/** The options of a call as the stubs take them. */
export function stubOptions({ signal, timeoutMs }: CallOptions) {
  return {
    ...(signal === undefined ? {} : { signal }),
    ...(timeoutMs === undefined ? {} : { timeoutMs: Math.ceil(timeoutMs) }),
  };
}

/** Runs a unary call of one connection. */
export async function unary<T>(
  connection: Connection,
  options: CallOptions,
  requestId: string,
  call: (connection: Connection, options: { signal?: AbortSignal; timeoutMs?: number }) => Promise<T>,
): Promise<T> {
  try {
    return await call(connection, stubOptions(options));
  } catch (failure) {
    throw errorFromCall(failure, { target: connection.target, signal: options.signal, requestId });
  }
}
