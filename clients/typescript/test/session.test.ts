import assert from "node:assert/strict";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";
import {
  AlreadyExistsError,
  CancelledError,
  Client,
  DeadlineExceededError,
  type HeadraceError,
  ProtocolError,
  RequestMovedError,
  UnavailableError,
} from "@headrace/client";
import { FinishReason, type StreamResultRequest } from "@headrace/client/contract";

import { type Answer, Events, ScriptedServer, session, status, wholeAnswer } from "./server.js";
import { traced, useTelemetry } from "./telemetry.js";

/** Each `add` is answered whole, at once. */
const obedient = () => {
  let number = 0;
  return session(function* ({ commandId, command }) {
    if (command.case === "add") {
      number += 1;
      yield { instanceId: "i", events: wholeAnswer(commandId, command.value, number, "one ", "two") };
    }
  });
};

test("each request has its own output", async () => {
  await using server = await ScriptedServer.start(obedient());
  await using client = new Client(server.target);
  await using opened = client.session();
  const requests = Array.from({ length: 64 }, (_, index) => opened.submit("hi", { requestId: `r${index}` }));
  for (const [index, request] of requests.entries()) {
    const texts: string[] = [];
    for await (const chunk of request) {
      texts.push(chunk.text);
    }
    const result = await request.result();
    assert.deepEqual(texts, ["one ", "two"]);
    assert.deepEqual([result.requestId, result.text, result.seed], [`r${index}`, "one two", 2n ** 63n - 1n]);
  }
  assert.equal(opened.live, 0);
});

test("a request that is not read delays no other", async () => {
  await using server = await ScriptedServer.start(obedient());
  await using client = new Client(server.target);
  await using opened = client.session();
  opened.submit("never read");
  assert.equal((await opened.submit("read").result()).text, "one two");
});

test("a refusal is its request's alone, with its fields", async () => {
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }) {
      if (command.case !== "add") {
        return;
      }
      if (command.value.spec?.requestId === "bad") {
        const refusal = status(Code.InvalidArgument, "INVALID_FIELD", { field: "spec.n" });
        yield { rejections: [{ commandId, requestId: "bad", status: refusal }] };
      } else {
        yield { events: wholeAnswer(commandId, command.value, 1, "good") };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  const [bad, good] = [opened.submit("x", { requestId: "bad" }), opened.submit("x", { requestId: "good" })];
  await assert.rejects(bad.result(), (error: HeadraceError) => {
    assert.deepEqual(
      [error.name, error.code, error.reason],
      ["InvalidArgumentError", "INVALID_ARGUMENT", "INVALID_FIELD"],
    );
    assert.deepEqual(error.fields, [{ field: "spec.n", description: "is wrong" }]);
    assert.deepEqual([error.requestId, error.errorId, error.fromServer], ["bad", "e1", true]);
    return true;
  });
  assert.equal((await good.result()).text, "good");
});

test("a request without room is sent again when the server says so", async () => {
  const adds: StreamResultRequest[] = [];
  await using server = await ScriptedServer.start(
    session(function* (request) {
      const { commandId, command } = request;
      if (command.case !== "add") {
        return;
      }
      adds.push(request);
      const requestId = command.value.spec?.requestId ?? "";
      yield adds.length < 3
        ? {
            rejections: [
              { commandId, requestId, status: status(Code.ResourceExhausted, "QUEUE_FULL", { retryMs: 5 }) },
            ],
          }
        : { events: wholeAnswer(commandId, command.value, 1, "at last") };
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  assert.equal((await opened.submit("x").result()).text, "at last");
  assert.equal(adds.length, 3);
  await using impatient = client.session({ roomTimeoutMs: 0 });
  adds.length = 0;
  await assert.rejects(impatient.submit("x").result(), { code: "RESOURCE_EXHAUSTED", retryAfterMs: 5 });
  assert.equal(adds.length, 1);
});

test("cancel ends a request with its output so far", async () => {
  let events: Events | undefined;
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "add") {
        events = new Events(command.value.spec?.requestId ?? "", commandId, 1);
        yield { events: [events.accepted(), events.text("so far")] };
      } else if (command.case === "cancel" && events !== undefined) {
        yield { events: [events.finished(FinishReason.CANCELLED)] };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  const request = opened.submit("x");
  for await (const chunk of request) {
    assert.equal(chunk.text, "so far");
    request.cancel();
  }
  const { finishReason, text } = await request.result();
  assert.deepEqual([finishReason, text], ["cancelled", "so far"]);
});

test("a wait may end before its request, which goes on", async () => {
  let finish: (() => void) | undefined;
  await using server = await ScriptedServer.start(
    session(async function* ({ commandId, command }): AsyncGenerator<Answer> {
      if (command.case === "add") {
        const events = new Events(command.value.spec?.requestId ?? "", commandId, 1);
        yield { events: [events.accepted()] };
        await new Promise<void>((resolve) => {
          finish = resolve;
        });
        yield { events: [events.text("late"), events.finished()] };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  const request = opened.submit("x");
  await request.accepted();
  await assert.rejects(request.result({ timeoutMs: 1 }), DeadlineExceededError);
  const abort = new AbortController();
  const waiting = request.result({ signal: abort.signal });
  abort.abort(new Error("enough"));
  await assert.rejects(waiting, (error: CancelledError) => {
    assert.ok(error instanceof CancelledError);
    assert.equal((error.cause as Error).message, "enough");
    return true;
  });
  finish?.();
  assert.equal((await request.result()).text, "late");
});

for (const [name, spoil, due] of [
  ["missing", (event: { seq: bigint }) => ({ ...event, seq: event.seq + 1n }), "event 3 came where 2 was due"],
  ["repeated", (event: { seq: bigint }) => ({ ...event, seq: event.seq - 1n }), "event 1 came where 2 was due"],
  ["of another choice", (event: { seq: bigint }) => ({ ...event, choiceIndex: 1 }), "of choice 1, out of 1"],
] as const) {
  test(`an event that is ${name} fails its request, which is cancelled`, async () => {
    const cancelled: string[] = [];
    await using server = await ScriptedServer.start(
      session(function* ({ commandId, command }): Generator<Answer> {
        if (command.case === "cancel") {
          cancelled.push(command.value.requestId);
        } else if (command.case === "add" && command.value.spec?.requestId === "bad") {
          const events = new Events("bad", commandId, 1);
          yield { events: [events.accepted(), spoil(events.text("x") as { seq: bigint })] };
        } else if (command.case === "add") {
          yield { events: wholeAnswer(commandId, command.value, 2, "good") };
        }
      }),
    );
    await using client = new Client(server.target);
    await using opened = client.session();
    const bad = opened.submit("x", { requestId: "bad" });
    await assert.rejects(bad.result(), (error: HeadraceError) => {
      assert.ok(error instanceof ProtocolError);
      assert.ok(error.message.includes(due), error.message);
      return true;
    });
    assert.equal((await opened.submit("y").result()).text, "good");
    assert.deepEqual(cancelled, ["bad"]);
  });
}

test("an id that is live on the session is not sent again", async () => {
  await using server = await ScriptedServer.start(session(() => []));
  await using client = new Client(server.target);
  await using opened = client.session();
  const lost = assert.rejects(opened.submit("x", { requestId: "a" }).result(), UnavailableError);
  assert.throws(() => opened.submit("x", { requestId: "a" }), AlreadyExistsError);
  assert.equal(opened.live, 1);
  await client.close();
  await lost;
});

test("a request that another stream attached ends with what came", async () => {
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "add") {
        const events = new Events("moved", commandId, 7);
        yield { events: [events.accepted(), events.text("begun")] };
        yield { detached: [{ requestId: "moved", requestNumber: 7 }] };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session({ leaseMs: 1000 });
  await assert.rejects(opened.submit("x", { requestId: "moved" }).result(), (error: HeadraceError) => {
    assert.ok(error instanceof RequestMovedError);
    assert.deepEqual([error.reason, error.partial?.text], ["REQUEST_MOVED", "begun"]);
    return true;
  });
});

test("credit is given for what the reader took", async () => {
  const credits: number[] = [];
  let initial: number | undefined;
  let events: Events | undefined;
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "open") {
        initial = command.value.initialCredit;
      } else if (command.case === "add") {
        events = new Events(command.value.spec?.requestId ?? "", commandId, 1);
        yield { events: [events.accepted(), events.text("abc")] };
      } else if (command.case === "credit" && events !== undefined) {
        credits.push(command.value.tokens);
        yield { events: [credits.length < 3 ? events.text("abc") : events.finished()] };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session({ initialCredit: 3 });
  const chunks: string[] = [];
  for await (const chunk of opened.submit("x")) {
    chunks.push(chunk.text);
  }
  assert.deepEqual([initial, credits, chunks], [3, [3, 3, 3], ["abc", "abc", "abc"]]);
});

test("without a lease a lost connection fails what runs, and ends the session", async () => {
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "add") {
        const events = new Events(command.value.spec?.requestId ?? "", commandId, 1);
        yield { events: [events.accepted(), events.text("begun")] };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  const request = opened.submit("x");
  await request[Symbol.asyncIterator]().next();
  server.cut();
  await assert.rejects(request.result(), (error: HeadraceError) => {
    assert.ok(error instanceof UnavailableError);
    assert.deepEqual([error.partial?.text, error.reason], ["begun", ""]);
    return true;
  });
  assert.throws(() => opened.submit("y"), UnavailableError);
});

test("with a lease a session goes on where it was, and nothing shows of it", async () => {
  const attached: [string, bigint][] = [];
  const begun = new Events("r", 0n, 1);
  let server: ScriptedServer | undefined;
  await using started = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "open") {
        yield { opened: { commandId, lease: command.value.lease! }, instanceId: "i" };
      } else if (command.case === "add") {
        const accepted = begun.accepted();
        yield { events: [{ ...accepted, requestNumber: 1 }, begun.text("one ")] };
      } else if (command.case === "attach") {
        attached.push([command.value.instanceId, command.value.fromSeq]);
        yield { attached: [{ commandId, requestId: "r", fromSeq: 3n, requestNumber: 1 }] };
        yield { events: [begun.text("two"), begun.finished()] };
      }
    }),
    { models: { getModel: () => ({ model: { instanceId: "i", limits: { maxRunningRequests: 4 } } }) } },
  );
  server = started;
  await using client = new Client(server.target);
  await using opened = client.session({ leaseMs: 60_000 });
  const request = opened.submit("x", { requestId: "r" });
  const texts: string[] = [];
  for await (const chunk of request) {
    texts.push(chunk.text);
    if (texts.length === 1) {
      server.cut();
    }
  }
  assert.deepEqual([texts, attached], [["one ", "two"], [["i", 3n]]]);
  assert.equal((await request.result()).text, "one two");
});

test("with a lease a request without output is sent again, with the same id", async () => {
  const ids: string[] = [];
  let server: ScriptedServer | undefined;
  await using started = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "add") {
        ids.push(command.value.spec?.requestId ?? "");
        if (ids.length === 1) {
          server?.cut();
        } else {
          yield { events: wholeAnswer(commandId, command.value, 1, "again") };
        }
      }
    }),
    { models: { getModel: () => ({ model: { instanceId: "i", limits: { maxRunningRequests: 4 } } }) } },
  );
  server = started;
  await using client = new Client(server.target);
  await using opened = client.session({ leaseMs: 60_000 });
  assert.equal((await opened.submit("x").result()).text, "again");
  assert.equal(ids.length, 2);
  assert.equal(ids[0], ids[1]);
});

test("a close waits for what runs, then half-closes; no stream is left", async () => {
  let isOver = false;
  await using server = await ScriptedServer.start({
    async *streamResult(commands) {
      for await (const { commandId, command } of commands) {
        if (command.case === "add") {
          yield { events: wholeAnswer(commandId, command.value, 1, "whole") };
        }
      }
      isOver = true;
    },
  });
  await using client = new Client(server.target);
  const opened = client.session();
  const request = opened.submit("x");
  await opened.close();
  assert.deepEqual([isOver, request.done, (await request.result()).text], [true, true, "whole"]);
  assert.throws(() => opened.submit("y"), UnavailableError);
});

test("closing the client ends what runs on it", async () => {
  await using server = await ScriptedServer.start(session(() => []));
  const client = new Client(server.target);
  const opened = client.session();
  const result = opened.submit("x").result();
  await client.close();
  await assert.rejects(result, UnavailableError);
  await opened.close();
  assert.equal(server.connections.size, 0); // none was opened for a call that was begun before
});

test("a request's labels have the trace in which it was submitted; the user's own stay", async () => {
  useTelemetry();
  const labels: string[][] = [];
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }) {
      if (command.case === "add") {
        labels.push((command.value.spec?.labels ?? []).map(({ name, value }) => `${name}=${value}`));
        yield { events: wholeAnswer(commandId, command.value, labels.length, "x") };
      }
    }),
  );
  await using client = new Client(server.target);
  await using opened = client.session();
  const trace = "00-11111111111111111111111111111111-2222222222222222-01";
  await traced(trace, () => opened.submit("x", { labels: { team: "a" } })).result();
  await traced(trace, () => opened.submit("x", { labels: { traceparent: "mine" } })).result();
  await opened.submit("x").result();
  assert.deepEqual(labels, [["team=a", `traceparent=${trace}`], ["traceparent=mine"], []]);
});
