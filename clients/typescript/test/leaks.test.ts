import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { promisify } from "node:util";

import { FinishReason } from "@headrace/client/contract";

import { Events, ScriptedServer, session, wholeAnswer } from "./server.js";

const run = promisify(execFile);

const CALLS = `
  import { Client } from "@headrace/client";
  const client = new Client(process.argv[1].split(","));
  await client.generate("x");
  for await (const chunk of client.stream("x")) {}
  for await (const chunk of client.stream("x")) break;
  for await (const outcome of client.batch(["a", "b"])) {}
  const session = client.session({ leaseMs: 60_000 });
  await session.submit("x").result();
  session.submit("x", { requestId: "endless" });
`;

const generation = {
  ...session(function* ({ commandId, command }) {
    const number = Number(commandId);
    if (command.case === "add" && command.value.spec?.requestId !== "endless") {
      yield { events: wholeAnswer(commandId, command.value, number, "x") };
    } else if (command.case === "cancel") {
      const events = new Events("endless", 0n, number);
      yield { events: [events.accepted(), events.finished()] };
    }
  }),
  generate: () => ({ choices: [{ text: "x", finished: { reason: FinishReason.STOP } }] }),
  async *generateStream({ spec }: { spec?: { requestId: string } | undefined }) {
    const events = new Events(spec?.requestId ?? "");
    yield { events: [events.accepted(), events.text("x"), events.text("y")] };
    yield { events: [events.finished()] };
  },
};
const models = { getModel: () => ({ model: { instanceId: "i", limits: { maxRunningRequests: 4 } } }) };

for (const [name, end] of [
  ["a session and a client that were closed", "await session.close({ cancel: true }); await client.close();"],
  ["a client that was closed", "await client.close();"],
  ["a client whose calls have ended", "await session.close({ cancel: true });"],
] as const) {
  for (const servers of ["one server", "a fleet"]) {
    test(`${name}: the program ends by itself, with ${servers}`, { timeout: 30_000 }, async () => {
      await using server = await ScriptedServer.start(generation, { models });
      const target = servers === "one server" ? server.target : `${server.target},127.0.0.1:1`;
      const { stderr } = await run(process.execPath, ["--input-type=module", "--eval", CALLS + end, target]);
      assert.equal(stderr, "");
    });
  }
}
