import assert from "node:assert/strict";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";
import { Client } from "@headrace/client";
import type { LoadAdapterRequest, UnloadAdapterRequest } from "@headrace/client/contract";

import { failure, ScriptedServer } from "./server.js";

test("an adapter is loaded as asked", async () => {
  const asked: LoadAdapterRequest[] = [];
  const loadAdapter = (request: LoadAdapterRequest) => {
    asked.push(request);
    return { adapter: { name: request.name, digest: "ab" }, evicted: ["old"] };
  };
  await using server = await ScriptedServer.start({}, { control: { loadAdapter } });
  await using client = new Client(server.target);
  const { adapter, evicted } = await client.control.loadAdapter("team-a", "a/v1");
  assert.deepEqual([adapter?.name, adapter?.digest, evicted], ["team-a", "ab", ["old"]]);
  await client.control.loadAdapter("team-a", "a/v2", { pinned: true, replace: true });
  assert.deepEqual(
    asked.map(({ name, source, pinned, replace }) => [name, source, pinned, replace]),
    [
      ["team-a", "a/v1", false, false],
      ["team-a", "a/v2", true, true],
    ],
  );
});

test("a load is not tried again", async () => {
  let calls = 0;
  const loadAdapter = () => {
    calls += 1;
    throw failure(Code.Unavailable, "LOADING");
  };
  await using server = await ScriptedServer.start({}, { control: { loadAdapter } });
  await using client = new Client(server.target);
  await assert.rejects(client.control.loadAdapter("a", "a"), { name: "UnavailableError", reason: "LOADING" });
  assert.equal(calls, 1);
});

test("requests of an unloaded adapter have the time that was given, or all that they need", async () => {
  const asked: UnloadAdapterRequest[] = [];
  const unloadAdapter = (request: UnloadAdapterRequest) => {
    asked.push(request);
    return { liveRequests: 3n };
  };
  await using server = await ScriptedServer.start({}, { control: { unloadAdapter } });
  await using client = new Client(server.target);
  for (const graceMs of [undefined, 0, 60_000]) {
    assert.equal(await client.control.unloadAdapter("a", { graceMs }), 3);
  }
  assert.deepEqual(
    asked.map(({ timeout }) => timeout?.seconds),
    [undefined, 0n, 60n],
  );
  await assert.rejects(client.control.unloadAdapter("a", { graceMs: -1 }), { name: "InvalidArgumentError" });
});

test("adapters are listed from all pages", async () => {
  const listAdapters = ({ pageToken }: { pageToken: string }) =>
    pageToken === ""
      ? { adapters: [{ name: "a" }, { name: "b" }], nextPageToken: "c" }
      : { adapters: [{ name: pageToken }] };
  await using server = await ScriptedServer.start({}, { models: { listAdapters } });
  await using client = new Client(server.target);
  assert.deepEqual(
    (await client.adapters()).map(({ name }) => name),
    ["a", "b", "c"],
  );
});

test("control is of one server", async () => {
  await using client = new Client(["127.0.0.1:1", "127.0.0.1:2"]);
  assert.throws(() => client.control, { name: "InvalidArgumentError", message: /several servers/ });
});
