// The conformance suite's driver of this library: tests/conformance/README.md. It translates, and decides nothing.
import { Client, type RequestStream, type Session, SessionRequest } from "@headrace/client";

import { traced, useTelemetry } from "../test/telemetry.js";
import {
  optionsOf,
  promptOf,
  type RequestTold,
  tellAdapter,
  tellChunk,
  tellError,
  tellOutcome,
  tellResult,
  type Told,
  unknownMembers,
} from "./telling.js";

/** A command's members, by all commands' names. */
interface Command {
  id: number;
  op: string;
  client: string;
  session: string;
  handle: string;
  of: never;
  request: RequestTold;
  requests: RequestTold[];
  [member: string]: unknown;
}

/** A handle, and its iterator once it was read. */
interface Handle {
  readonly request: SessionRequest | RequestStream;
  readonly abort: AbortController;
  /** Gives up a read. */
  reading: AbortController;
  chunks?: AsyncIterator<Told>;
  taken: number;
}

const MEMBERS: Record<string, string> = {
  connect: "client targets token ca server_name metadata retries max_message_bytes",
  close_client: "client",
  generate: "client request traceparent",
  abandon: "of",
  stream: "client handle request deadline_ms traceparent",
  open_session: "client session lease_ms initial_credit room_timeout_ms traceparent",
  submit: "session handle request",
  attach: "session handle request_id from_seq n",
  resume: "session handle of",
  read: "handle chunks",
  result: "handle timeout_ms",
  cancel: "handle",
  leave: "handle",
  session: "session",
  close_session: "session cancel",
  batch: "client requests max_in_flight ordered",
  add_request: "client request",
  get_result: "client request_id timeout_ms",
  cancel_ids: "client request_ids",
  load_adapter: "client name source pinned replace",
  unload_adapter: "client name timeout_ms",
  adapters: "client",
};

const clients = new Map<string, Client>();
const sessions = new Map<string, Session>();
const handles = new Map<string, Handle>();
/** Of the commands that wait: how they are given up. */
const waiting = new Map<number, AbortController>();

function found<T>(map: ReadonlyMap<string, T>, name: string): T {
  const value = map.get(name);
  if (value === undefined) {
    throw new Error(`there is no ${name}`);
  }
  return value;
}

function keep(name: string, request: SessionRequest | RequestStream, abort = new AbortController()): void {
  handles.set(name, { request, abort, reading: new AbortController(), taken: 0 });
}

function given<T>(value: unknown): T | undefined {
  return (value ?? undefined) as T | undefined;
}

const COMMANDS: Record<string, (command: Command, signal: AbortSignal, chunks: Told[]) => Told | Promise<Told>> = {
  connect({ client, targets, token, ca, server_name: serverName, metadata, retries, max_message_bytes: bytes }) {
    const names = targets as string[];
    const [one] = names;
    const tls =
      ca == null && serverName == null
        ? undefined
        : { caFile: given<string>(ca), serverName: given<string>(serverName) };
    const options = { token: given<string>(token), tls, metadata: given<Record<string, string>>(metadata) };
    const limits = { retries: given<number>(retries), maxMessageBytes: given<number>(bytes) };
    clients.set(client, new Client(names.length === 1 ? one : names, { ...options, ...limits }));
    return {};
  },
  async close_client({ client }) {
    await found(clients, client).close();
    return {};
  },
  async generate({ client, request, traceparent }, signal) {
    const call = { ...optionsOf(request), signal };
    const result = traced(given(traceparent), () => found(clients, client).generate(promptOf(request), call));
    return tellResult(await result);
  },
  abandon({ of }) {
    waiting.get(of)?.abort();
    return {};
  },
  stream({ client, handle, request, deadline_ms: timeoutMs, traceparent }) {
    const abort = new AbortController();
    const call = { ...optionsOf(request), timeoutMs: given<number>(timeoutMs), signal: abort.signal };
    const stream = traced(given(traceparent), () => found(clients, client).stream(promptOf(request), call));
    keep(handle, stream, abort);
    return {};
  },
  open_session({ client, session, lease_ms, initial_credit, room_timeout_ms, traceparent }) {
    const options = {
      leaseMs: given<number>(lease_ms),
      initialCredit: given<number>(initial_credit),
      roomTimeoutMs: given<number>(room_timeout_ms),
    };
    sessions.set(
      session,
      traced(given(traceparent), () => found(clients, client).session(options)),
    );
    return {};
  },
  submit({ session, handle, request }) {
    const made = found(sessions, session).submit(promptOf(request), optionsOf(request));
    keep(handle, made);
    return { request_id: made.requestId };
  },
  attach({ session, handle, request_id: id, from_seq: fromSeq, n }) {
    const options = {
      ...(fromSeq == null ? {} : { fromSeq: fromSeq as number }),
      ...(n == null ? {} : { n: n as number }),
    };
    keep(handle, found(sessions, session).attach(id as string, options));
    return {};
  },
  resume({ session, handle, of }) {
    keep(handle, found(sessions, session).resume(found(handles, of).request as SessionRequest));
    return {};
  },
  async read({ handle: name, chunks: wanted }, signal, chunks) {
    const handle = found(handles, name);
    handle.chunks ??= chunksOf(handle);
    signal.addEventListener("abort", () => handle.reading.abort());
    while (wanted == null || chunks.length < (wanted as number)) {
      const next = await handle.chunks.next().catch((error: unknown) => {
        delete handle.chunks; // a wait that was given up; the next read goes on behind what was taken
        handle.reading = new AbortController();
        throw error;
      });
      if (next.done) {
        return { chunks, end: true };
      }
      handle.taken += 1;
      chunks.push(next.value);
    }
    return { chunks, end: false };
  },
  async result({ handle, timeout_ms: timeoutMs }, signal) {
    const { request } = found(handles, handle);
    const wait = { timeoutMs: given<number>(timeoutMs), signal };
    return tellResult(await (request instanceof SessionRequest ? request.result(wait) : request.result()));
  },
  async cancel({ handle }) {
    await found(handles, handle).request.cancel();
    return {};
  },
  async leave({ handle }) {
    await (found(handles, handle).request as RequestStream).close();
    return {};
  },
  session({ session }) {
    const { leaseMs, live } = found(sessions, session);
    return { lease_ms: leaseMs ?? null, live };
  },
  async close_session({ session, cancel }) {
    await found(sessions, session).close({ cancel: cancel === true });
    return {};
  },
  async batch({ client, requests, max_in_flight: maxInFlight, ordered }) {
    const all = requests.map((request) => ({ prompt: promptOf(request), options: optionsOf(request) }));
    const options = { maxInFlight: given<number>(maxInFlight), ordered: ordered === true };
    const outcomes: Told[] = [];
    for await (const outcome of found(clients, client).batch(all, options)) {
      outcomes.push(tellOutcome(outcome));
    }
    return { outcomes };
  },
  async add_request({ client, request }) {
    return { request_id: (await found(clients, client).addRequest(promptOf(request), optionsOf(request))).requestId };
  },
  async get_result({ client, request_id: id, timeout_ms: timeoutMs }, signal) {
    return tellResult(
      await found(clients, client).getResult(id as string, { timeoutMs: given<number>(timeoutMs), signal }),
    );
  },
  async cancel_ids({ client, request_ids: ids }) {
    return { statuses: Object.fromEntries(await found(clients, client).cancel(ids as string[])) };
  },
  async load_adapter({ client, name, source, pinned, replace }) {
    const options = { pinned: pinned === true, replace: replace === true };
    const { control } = found(clients, client);
    const { adapter, evicted } = await control.loadAdapter(name as string, source as string, options);
    return { adapter: tellAdapter(adapter), evicted };
  },
  async unload_adapter({ client, name, timeout_ms: graceMs }) {
    const { control } = found(clients, client);
    return { live: await control.unloadAdapter(name as string, { graceMs: given<number>(graceMs) }) };
  },
  async adapters({ client }) {
    return { adapters: (await found(clients, client).adapters()).map(tellAdapter) };
  },
};

/** A handle's chunks, as they are told, behind those that were taken. */
async function* chunksOf({ request, reading, taken }: Handle): AsyncGenerator<Told> {
  const { signal } = reading;
  let position = 0;
  for await (const chunk of request instanceof SessionRequest ? request.chunks({ signal }) : request) {
    position += 1;
    if (position > taken) {
      yield tellChunk(chunk);
    }
  }
}

function tell(answer: Told): void {
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

function unsupported(command: Command): string | undefined {
  const known = MEMBERS[command.op]?.split(" ");
  if (known === undefined) {
    return `there is no command ${command.op}`;
  }
  const unknown = Object.keys(command).filter(
    (name) => !["id", "op", ...known].includes(name) && command[name] !== null,
  );
  const requests = [command.request, ...(command.requests ?? [])];
  unknown.push(...requests.flatMap((request) => (request == null ? [] : unknownMembers(request))));
  return unknown.length > 0 ? `there is no member ${unknown.join(", ")}` : undefined;
}

async function answer(command: Command): Promise<void> {
  const { id } = command;
  const problem = unsupported(command);
  if (problem !== undefined) {
    tell({ id, unsupported: problem });
    return;
  }
  const abort = new AbortController();
  const chunks: Told[] = [];
  waiting.set(id, abort);
  try {
    tell({ id, ok: await COMMANDS[command.op]?.(command, abort.signal, chunks) });
  } catch (error) {
    tell({ id, error: tellError(error), ...(command.op === "read" ? { chunks } : {}) });
  } finally {
    waiting.delete(id);
  }
}

useTelemetry();
tell({ ready: { language: "typescript", protocol: 1 } });
let rest = "";
process.stdin.setEncoding("utf8");
for await (const piece of process.stdin) {
  const lines = (rest + String(piece)).split("\n");
  rest = lines.pop() ?? "";
  for (const line of lines) {
    void answer(JSON.parse(line) as Command);
  }
}
for (const client of clients.values()) {
  await client.close();
}
