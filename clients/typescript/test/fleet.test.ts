import assert from "node:assert/strict";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";
import { Client, type HeadraceError, NotFoundError, UnavailableError } from "@headrace/client";
import { CancelStatus, FinishReason } from "@headrace/client/contract";

import { Events, failure, ScriptedServer, session, status, wholeAnswer } from "./server.js";

/** A server of a fleet, whose answers tell its name. */
async function member(name: string, options: { refuses?: boolean; dies?: boolean } = {}) {
  const seen: string[] = [];
  let number = 0;
  let server: ScriptedServer | undefined;
  const started = await ScriptedServer.start(
    {
      ...session(function* ({ commandId, command }) {
        if (command.case !== "add") {
          return;
        }
        const requestId = command.value.spec?.requestId ?? "";
        seen.push(requestId);
        number += 1;
        if (options.refuses) {
          const refusal = status(Code.ResourceExhausted, "QUEUE_FULL", { retryMs: 60_000 });
          yield { instanceId: name, rejections: [{ commandId, requestId, status: refusal }] };
        } else if (options.dies) {
          const events = new Events(requestId, commandId, number);
          yield { instanceId: name, events: [events.accepted()] };
          setImmediate(() => server?.cut());
        } else {
          yield { instanceId: name, events: wholeAnswer(commandId, command.value, number, name) };
        }
      }),
      generate: ({ spec }) => {
        seen.push(spec?.requestId ?? "");
        if (options.refuses) {
          throw failure(Code.Unavailable, "DRAINING");
        }
        const choices = [{ text: name, finished: { reason: FinishReason.STOP } }];
        return { requestId: spec?.requestId ?? "", instanceId: name, choices };
      },
      addRequest: ({ spec }) => {
        seen.push(spec?.requestId ?? "");
        return { requestId: spec?.requestId ?? "", instanceId: name };
      },
      getResult: ({ requestId, instanceId }) => {
        if (!seen.includes(requestId)) {
          throw failure(Code.NotFound, "NOT_FOUND");
        }
        assert.ok(instanceId === "" || instanceId === name);
        const events = new Events(requestId);
        return { instanceId: name, done: true, events: [events.accepted(), events.text(name), events.finished()] };
      },
      cancel: ({ requestIds }) => ({
        results: requestIds.map((requestId) => ({
          requestId,
          status: seen.includes(requestId) ? CancelStatus.CANCELLED : CancelStatus.NOT_FOUND,
        })),
      }),
    },
    { models: { getModel: () => ({ model: { instanceId: name, limits: { maxRunningRequests: 2 } } }) } },
  );
  server = started;
  return { server: started, seen, [Symbol.asyncDispose]: () => started[Symbol.asyncDispose]() };
}

const targets = (...members: Awaited<ReturnType<typeof member>>[]) => members.map(({ server }) => server.target);

test("requests go to all servers", async () => {
  await using a = await member("a");
  await using b = await member("b");
  await using client = new Client(targets(a, b));
  await using opened = client.session();
  const results = await Promise.all(Array.from({ length: 8 }, () => opened.submit("x").result()));
  assert.deepEqual(new Set(results.map((result) => result.text)), new Set(["a", "b"]));
  assert.equal(a.seen.length + b.seen.length, 8);
});

test("a server that is full, or lost before the first output, is left to the others", async () => {
  for (const fault of [{ refuses: true }, { dies: true }]) {
    await using bad = await member("bad", fault);
    await using good = await member("good");
    await using client = new Client(targets(bad, good));
    await using opened = client.session();
    const results = await Promise.all(Array.from({ length: 4 }, () => opened.submit("x").result()));
    assert.deepEqual(
      results.map((result) => result.text),
      Array(4).fill("good"),
    );
    assert.ok(bad.seen.every((id) => good.seen.includes(id)));
  }
});

test("a call that a server refuses is made elsewhere, with the same id", async () => {
  await using bad = await member("bad", { refuses: true });
  await using good = await member("good");
  await using client = new Client(targets(bad, good));
  const results = await Promise.all([client.generate("x"), client.generate("y")]);
  assert.deepEqual(
    results.map((result) => result.text),
    ["good", "good"],
  );
  assert.ok(bad.seen.every((id) => good.seen.includes(id)));
});

test("calls by id go where the request is, also if another process started it", async () => {
  await using a = await member("a");
  await using b = await member("b");
  await using client = new Client(targets(a, b));
  const ids = await Promise.all(Array.from({ length: 4 }, async () => (await client.addRequest("x")).requestId));
  await using other = new Client(targets(a, b));
  for (const asking of [client, other]) {
    for (const id of ids) {
      assert.equal((await asking.getResult(id)).text, a.seen.includes(id) ? "a" : "b");
    }
    const statuses = await asking.cancel([...ids, "nowhere"]);
    assert.deepEqual([...statuses.values()], [...ids.map(() => "cancelled"), "not_found"]);
    await assert.rejects(asking.getResult("nowhere"), NotFoundError);
  }
});

test("a name's addresses are servers; those that nobody answers at are left out", async () => {
  await using a = await member("a");
  await using client = new Client(`dns:///localhost:${a.server.port}`);
  assert.equal((await client.generate("x")).text, "a");
});

test("if no server is ready, a request says why", { timeout: 20_000 }, async () => {
  await using client = new Client(["127.0.0.1:1", "127.0.0.1:2"], { retries: 0 });
  await assert.rejects(client.generate("x"), (error: HeadraceError) => {
    assert.ok(error instanceof UnavailableError);
    assert.match(error.message, /none of 2 servers is ready: .*127\.0\.0\.1:1/);
    return true;
  });
});
