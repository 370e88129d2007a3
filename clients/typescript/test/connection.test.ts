import assert from "node:assert/strict";
import { test } from "node:test";

import { Client } from "@headrace/client";
import { FinishReason } from "@headrace/client/contract";

import { ScriptedServer } from "./server.js";

test("a server may send ahead", async () => {
  const generate = () => ({ choices: [{ text: "x", finished: { reason: FinishReason.STOP } }] });
  await using server = await ScriptedServer.start({ generate });
  await using client = new Client(server.target);
  await client.generate("a");
  await client.generate("b"); // what was told with the first call has come
  const [connection] = server.connections;
  assert.equal(connection?.remoteSettings.initialWindowSize, 1024 * 1024);
  const ahead = connection?.state.remoteWindowSize ?? 0;
  assert.ok(ahead > 3 * 1024 * 1024, `${ahead} bytes on the connection`);
});
