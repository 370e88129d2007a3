import assert from "node:assert/strict";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";
import { type BatchOutcome, Client, type Prompt, UnavailableError } from "@headrace/client";

import { type Answer, Events, ScriptedServer, session, status, wholeAnswer } from "./server.js";

/** Answers each `add` with its prompt. */
function echo(onAdd: (prompt: string) => void = () => {}) {
  let number = 0;
  return session(function* ({ commandId, command }): Generator<Answer> {
    if (command.case === "add") {
      const { value } = command;
      const prompt = value.spec?.input.case === "text" ? value.spec.input.value.text : "";
      onAdd(prompt);
      number += 1;
      yield { events: wholeAnswer(commandId, value, number, prompt) };
    }
  });
}

async function all(outcomes: AsyncIterable<BatchOutcome>): Promise<string[]> {
  const found: string[] = [];
  for await (const { index, result, error } of outcomes) {
    found.push(`${index}: ${error === undefined ? result.text : error.code}`);
  }
  return found;
}

test("each request has one outcome, with errors in their places", async () => {
  await using server = await ScriptedServer.start(echo());
  await using client = new Client(server.target);
  const prompts: Prompt[] = ["a", [], "c"];
  assert.deepEqual(await all(client.batch(prompts, { ordered: true })), ["0: a", "1: INVALID_ARGUMENT", "2: c"]);
  assert.deepEqual(await all(client.batch([])), []);
});

test("requests are read as they are needed, also from an async iterable", async () => {
  let inFlight = 0;
  let most = 0;
  let left = false;
  async function* prompts() {
    try {
      for (let index = 0; index < 20; index++) {
        inFlight += 1;
        most = Math.max(most, inFlight);
        yield { prompt: String(index), options: { maxTokens: 1 } };
      }
    } finally {
      left = true;
    }
  }
  await using server = await ScriptedServer.start(echo());
  await using client = new Client(server.target);
  const found: number[] = [];
  for await (const { index } of client.batch(prompts(), { maxInFlight: 3 })) {
    inFlight -= 1;
    found.push(index);
  }
  assert.deepEqual(
    found.sort((a, b) => a - b),
    Array.from({ length: 20 }, (_, index) => index),
  );
  assert.ok(most <= 5, `${most} were read ahead`);
  assert.ok(left);
});

test("leaving the loop cancels what runs, and lets go of the requests", async () => {
  const cancelled: string[] = [];
  let left = false;
  function* prompts() {
    try {
      yield* ["a", "b", "c", "d"];
    } finally {
      left = true;
    }
  }
  let number = 0;
  const open = new Map<string, Events>();
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case === "add") {
        number += 1;
        const id = command.value.spec?.requestId ?? "";
        const events = new Events(id, commandId, number);
        open.set(id, events);
        yield { events: [events.accepted(), ...(number === 1 ? [events.finished()] : [])] };
      } else if (command.case === "cancel") {
        cancelled.push(command.value.requestId);
        yield { events: [open.get(command.value.requestId)!.finished()] };
      }
    }),
  );
  await using client = new Client(server.target);
  for await (const { index } of client.batch(prompts(), { maxInFlight: 2 })) {
    assert.equal(index, 0);
    break;
  }
  assert.ok(cancelled.length >= 1);
  assert.ok(left);
});

test("a request without room waits, and the others with it", async () => {
  let refusals = 0;
  const seen: string[] = [];
  await using server = await ScriptedServer.start(
    session(function* ({ commandId, command }): Generator<Answer> {
      if (command.case !== "add") {
        return;
      }
      const id = command.value.spec?.requestId ?? "";
      seen.push(id);
      if (seen.length <= 2) {
        refusals += 1;
        const refusal = status(Code.ResourceExhausted, "QUEUE_FULL", { retryMs: 10 });
        yield { rejections: [{ commandId, requestId: id, status: refusal }] };
      } else {
        yield { events: wholeAnswer(commandId, command.value, seen.length, "ok") };
      }
    }),
  );
  await using client = new Client(server.target);
  const found = await all(client.batch(["a", "b", "c"], { maxInFlight: 2, ordered: true }));
  assert.deepEqual([found, refusals, seen.length], [["0: ok", "1: ok", "2: ok"], 2, 5]);
});

test("a lost connection ends the batch, after the outcomes of what was in flight", async () => {
  let server: ScriptedServer | undefined;
  let adds = 0;
  await using started = await ScriptedServer.start(
    echo(() => {
      adds += 1;
      if (adds === 3) {
        server?.cut();
      }
    }),
  );
  server = started;
  await using client = new Client(server.target);
  const found: string[] = [];
  const read = async () => {
    for await (const { index, error } of client.batch(["a", "b", "c", "d", "e"], { maxInFlight: 1 })) {
      found.push(`${index}: ${error?.code ?? "ok"}`);
    }
  };
  await assert.rejects(read(), UnavailableError);
  assert.deepEqual(found.slice(0, 3), ["0: ok", "1: ok", "2: UNAVAILABLE"]);
});
