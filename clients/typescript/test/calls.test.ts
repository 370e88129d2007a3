import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { Code, type HandlerContext } from "@connectrpc/connect";
import {
  CancelledError,
  Client,
  DeadlineExceededError,
  HeadraceError,
  InvalidArgumentError,
  ResourceExhaustedError,
  UnavailableError,
} from "@headrace/client";
import { CancelStatus, FinishReason, type GenerateRequest } from "@headrace/client/contract";

import { VERSION } from "#lib/version.js";
import { Events, failure, ScriptedServer } from "./server.js";
import { traced, useTelemetry } from "./telemetry.js";

const done = { text: "done", finished: { reason: FinishReason.STOP } };

/** A server whose generate fails as it is told, once for each, and then answers. */
async function failing(...failures: Error[]) {
  const calls: { at: number; request: GenerateRequest; header: Headers }[] = [];
  const server = await ScriptedServer.start({
    generate: (request, { requestHeader }: HandlerContext) => {
      calls.push({ at: performance.now(), request, header: requestHeader });
      const next = failures.shift();
      if (next !== undefined) {
        throw next;
      }
      return { requestId: request.spec?.requestId ?? "", choices: [done] };
    },
  });
  return { server, calls };
}

test("a call that the server cannot take now is made again, with the same id", async () => {
  const { server, calls } = await failing(
    failure(Code.Unavailable, "LOADING"),
    failure(Code.ResourceExhausted, "QUEUE_FULL", { retryMs: 30 }),
  );
  await using _ = server;
  await using client = new Client(server.target);
  assert.equal((await client.generate("x")).text, "done");
  const [first, second, third] = calls;
  assert.equal(calls.length, 3);
  assert.notEqual(first?.request.spec?.requestId, "");
  assert.equal(new Set(calls.map((call) => call.request.spec?.requestId)).size, 1);
  assert.ok((third?.at ?? 0) - (second?.at ?? 0) >= 29, "the advice was not heeded");
});

test("at most `retries` times", async () => {
  const { server, calls } = await failing(...Array.from({ length: 3 }, () => failure(Code.Unavailable, "LOADING")));
  await using _ = server;
  await using client = new Client(server.target, { retries: 1 });
  await assert.rejects(client.generate("x"), { name: "UnavailableError", reason: "LOADING" });
  assert.equal(calls.length, 2);
});

for (const [code, reason] of [
  [Code.InvalidArgument, "INVALID_FIELD"],
  [Code.ResourceExhausted, "NO_ADVICE"],
  [Code.Internal, "DEFECT"],
  [Code.NotFound, "NO_SUCH_MODEL"],
] as const) {
  test(`${reason} is not tried again`, async () => {
    const { server, calls } = await failing(failure(code, reason));
    await using _ = server;
    await using client = new Client(server.target);
    await assert.rejects(client.generate("x"), { reason });
    assert.equal(calls.length, 1);
  });
}

test("a call that the server forbids to make again is not", async () => {
  const final = failure(Code.Unavailable, "LOADING");
  final.metadata.set("grpc-retry-pushback-ms", "-1");
  const { server, calls } = await failing(final);
  await using _ = server;
  await using client = new Client(server.target);
  await assert.rejects(client.generate("x"), { reason: "LOADING", isFinal: true });
  assert.equal(calls.length, 1);
});

test("an abort ends the call, and its pause before another try", async () => {
  const { server, calls } = await failing(failure(Code.ResourceExhausted, "QUEUE_FULL", { retryMs: 3_600_000 }));
  await using _ = server;
  await using client = new Client(server.target);
  const abort = new AbortController();
  const answer = client.generate("x", { signal: abort.signal });
  const ended = assert.rejects(answer, (error: HeadraceError) => {
    assert.ok(error instanceof CancelledError);
    assert.equal(error.cause, "enough");
    return true;
  });
  while (calls.length === 0) {
    await new Promise(setImmediate);
  }
  setImmediate(() => abort.abort("enough"));
  await ended;
  assert.equal(calls.length, 1);
});

test("the signal's time is a deadline", async () => {
  await using server = await ScriptedServer.start({ generate: () => new Promise(() => {}) });
  await using client = new Client(server.target);
  await assert.rejects(client.generate("x", { signal: AbortSignal.timeout(20) }), DeadlineExceededError);
  await assert.rejects(client.generate("x", { timeoutMs: 20 }), DeadlineExceededError);
});

test("where nobody listens, a call fails with UNAVAILABLE and the address", async () => {
  for (const target of ["127.0.0.1:1", "unix:/nowhere/headrace.sock"]) {
    await using client = new Client(target, { retries: 0 });
    await assert.rejects(client.generate("x"), (error: HeadraceError) => {
      assert.ok(error instanceof UnavailableError);
      assert.ok(error.message.includes(target), error.message);
      assert.equal(error.reason, "");
      return true;
    });
  }
});

test("each call has the token, the metadata, the trace and the version", async () => {
  useTelemetry();
  const path = join(tmpdir(), `headrace-token-${process.pid}`);
  const { server, calls } = await failing();
  await using _ = server;
  let count = 0;
  const metadata = () => ({ "x-count": String((count += 1)) });
  await using client = new Client(server.target, { tokenFile: path, metadata });
  await writeFile(path, "first\n");
  await traced("00-11111111111111111111111111111111-2222222222222222-01", () => client.generate("x"));
  await writeFile(path, "second\n");
  await client.generate("x");
  const header = (name: string) => calls.map((call) => call.header.get(name));
  assert.deepEqual(header("authorization"), ["Bearer first", "Bearer second"]);
  assert.deepEqual(header("x-count"), ["1", "2"]);
  assert.deepEqual(header("traceparent"), ["00-11111111111111111111111111111111-2222222222222222-01", null]);
  assert.deepEqual(header("user-agent"), Array(2).fill(`headrace-typescript/${VERSION}`));
  const { version } = JSON.parse(readFileSync("package.json", "utf8")) as { version: string };
  assert.equal(VERSION, version);
});

test("a token function that fails is its own error, and is not tried again", async () => {
  let asked = 0;
  const token = () => {
    asked += 1;
    throw new Error("the vault is closed");
  };
  await using client = new Client("127.0.0.1:1", { token });
  await assert.rejects(client.generate("x"), (error: HeadraceError) => {
    assert.ok(error instanceof HeadraceError && !(error instanceof UnavailableError));
    assert.ok(error.message.includes("the vault is closed"), error.message);
    return true;
  });
  assert.equal(asked, 1);
});

test("options that contradict each other are refused", () => {
  assert.throws(() => new Client("example.org:50051", { token: "t" }), /clear text/);
  assert.throws(() => new Client("localhost", { token: "t", tokenFile: "f" }), /combined/);
  assert.throws(() => new Client("http://localhost:50051"), /is a URL/);
  assert.throws(() => new Client("localhost:0"), InvalidArgumentError);
  assert.throws(() => new Client(""), InvalidArgumentError);
  assert.throws(() => new Client("localhost", { tls: { cert: "c" } }), /go together/);
  assert.equal(new Client("example.org", { token: "t", tls: false }).target, "example.org:50051");
  assert.equal(new Client(["/a.sock", "unix:///b.sock", "[::1]:7"]).target, "unix:/a.sock,unix:/b.sock,[::1]:7");
});

test("a stream that fails has the output so far", async () => {
  await using server = await ScriptedServer.start({
    async *generateStream({ spec }) {
      const events = new Events(spec?.requestId ?? "");
      yield { events: [events.accepted(), events.text("so far")] };
      throw failure(Code.ResourceExhausted, "RESULTS_NOT_READ");
    },
  });
  await using client = new Client(server.target);
  const texts: string[] = [];
  const read = async () => {
    for await (const chunk of client.stream("x")) {
      texts.push(chunk.text);
    }
  };
  await assert.rejects(read(), (error: HeadraceError) => {
    assert.ok(error instanceof ResourceExhaustedError);
    assert.equal(error.partial?.text, "so far");
    return true;
  });
  assert.deepEqual(texts, ["so far"]);
});

test("leaving a stream's loop ends its call", async () => {
  let ended: () => void = () => {};
  const isEnded = new Promise<void>((resolve) => {
    ended = resolve;
  });
  await using server = await ScriptedServer.start({
    async *generateStream({ spec }, { signal }) {
      const events = new Events(spec?.requestId ?? "");
      yield { events: [events.accepted(), events.text("first")] };
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
      ended();
    },
  });
  await using client = new Client(server.target);
  for await (const chunk of client.stream("x")) {
    assert.equal(chunk.text, "first");
    break;
  }
  await isEnded;
});

test("a stream's cancel goes by its id, and gives a result", async () => {
  let cancel: (() => void) | undefined;
  await using server = await ScriptedServer.start({
    async *generateStream({ spec }) {
      const events = new Events(spec?.requestId ?? "");
      const cancelled = new Promise<void>((resolve) => {
        cancel = resolve;
      });
      yield { events: [events.accepted(), events.text("first")] };
      await cancelled;
      yield { events: [events.finished(FinishReason.CANCELLED)] };
    },
    cancel: ({ requestIds }) => {
      cancel?.();
      return { results: requestIds.map((requestId) => ({ requestId, status: CancelStatus.CANCELLED })) };
    },
  });
  await using client = new Client(server.target);
  const stream = client.stream("x");
  for await (const _ of stream) {
    await stream.cancel();
  }
  const { finishReason, text } = await stream.result();
  assert.deepEqual([finishReason, text], ["cancelled", "first"]);
});

test("tools: the model is told what its calls returned, and errors too", async () => {
  const asked: string[][] = [];
  await using server = await ScriptedServer.start({
    generate: ({ spec, requiredCapabilities }) => {
      const chat = spec?.input.case === "chat" ? spec.input.value : undefined;
      asked.push((chat?.messages ?? []).map(({ contentKind }) => String(contentKind.value ?? "")));
      assert.ok(requiredCapabilities.includes("typed_replies"));
      if (asked.length > 1) {
        return { choices: [done] };
      }
      const toolCalls = [
        { id: "1", name: "add", argumentsJson: '{"a": 1, "b": 2}' },
        { id: "2", name: "add", argumentsJson: "{" },
        { id: "3", name: "none", argumentsJson: "{}" },
      ];
      return { choices: [{ toolCalls, finished: { reason: FinishReason.STOP } }] }; // as arguments are no JSON
    },
  });
  await using client = new Client(server.target);
  const add = { name: "add", run: ({ a, b }: Record<string, unknown>) => Number(a) + Number(b) };
  const ends: unknown[] = [];
  for await (const { end } of client.runTools([{ role: "user", content: "?" }], [add])) {
    ends.push(end);
  }
  assert.deepEqual(ends, [undefined, "answered"]);
  assert.deepEqual(asked[1], [
    "?",
    "",
    "3",
    "error: the arguments are no JSON object; they were {",
    'error: there is no tool "none"; there are add',
  ]);
});

test("tools: calls of a reply that was cut are not run", async () => {
  const toolCalls = [{ id: "1", name: "add", argumentsJson: "{}" }];
  for (const [end, finished] of [
    ["cut", { reason: FinishReason.LENGTH }],
    ["cut", { reason: FinishReason.STOP, matched: { case: "stopString", value: "}" } }],
    ["max_turns", { reason: FinishReason.TOOL_CALLS, matched: { case: "stopString", value: "}" } }],
  ] as const) {
    await using server = await ScriptedServer.start({ generate: () => ({ choices: [{ toolCalls, finished }] }) });
    await using client = new Client(server.target);
    const add = { name: "add", run: () => assert.fail("it was run") };
    for await (const turn of client.runTools([{ role: "user", content: "?" }], [add], { maxTurns: 1 })) {
      assert.deepEqual([turn.end, turn.answers], [end, []]);
    }
  }
});
