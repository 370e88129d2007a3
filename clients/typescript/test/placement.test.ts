import assert from "node:assert/strict";
import { test } from "node:test";

import { create } from "@bufbuild/protobuf";
import { GenerationSpecSchema } from "@headrace/client";

import { order, Placement, prefixKeys } from "#lib/internal/placement.js";
import { buildSpec } from "#lib/options.js";

// The vectors of docs/fleet.md.

test("a text's key, and the order of servers for it", () => {
  const keys = prefixKeys(buildSpec("a".repeat(2000)));
  assert.equal(keys?.shared.toString("hex"), "e57e1cdbf524ce1c");
  assert.ok(keys?.own.equals(keys.shared));
  assert.deepEqual(order(keys.shared, ["c", "b", "a"]), ["a", "b", "c"]);
});

test("the key of token ids", () => {
  const keys = prefixKeys(buildSpec(Array.from({ length: 300 }, (_, id) => id)));
  assert.equal(keys?.shared.toString("hex"), "844d4a050671a7ca");
});

test("the keys of a conversation", () => {
  const messages = [
    { role: "system", content: "s".repeat(300) },
    { role: "user", content: "hi" },
  ] as const;
  const keys = prefixKeys(buildSpec(messages));
  assert.equal(keys?.shared.toString("hex"), "923bf3b05a357e08");
  assert.equal(keys?.own.toString("hex"), "9acc8f49988cc8c1");
});

test("short prompts, and those that bypass the cache, have none", () => {
  assert.equal(prefixKeys(buildSpec("a".repeat(255))), undefined);
  assert.equal(prefixKeys(buildSpec([1, 2, 3])), undefined);
  assert.equal(prefixKeys(buildSpec("a".repeat(2000), { bypassPrefixCache: true })), undefined);
  assert.equal(prefixKeys(create(GenerationSpecSchema)), undefined);
});

test("a character that is cut by the 1,024th byte counts with its first bytes", () => {
  const [whole, cut] = ["😀", "😁"].map((end) => prefixKeys(buildSpec(`${"a".repeat(1021)}${end}`)));
  assert.notEqual(whole, undefined);
  assert.deepEqual(whole, cut); // three of their four bytes are the same
});

test("a key's server is kept within the bound, and left beyond it", () => {
  const placement = new Placement();
  const keys = prefixKeys(buildSpec("a".repeat(2000))); // its order is a, b, c
  const loads = (a: number, b: number, c: number) =>
    Object.entries({ a, b, c }).map(([name, load]) => ({ name, load, capacity: 8, turn: 0 }));
  assert.equal(placement.choose(keys, loads(0, 0, 0)), "a");
  assert.equal(placement.choose(keys, loads(5, 1, 1)), "b"); // 5 is not below ⌈1.25 · 8 / 3⌉ + 1
  assert.equal(placement.choose(keys, loads(0, 0, 0)), "b"); // it stays where it went
});

test("a prompt without a key goes to the least loaded server, then to the one that was not chosen for longest", () => {
  const candidates = [
    { name: "a", load: 4, capacity: 8, turn: 1 },
    { name: "b", load: 2, capacity: 4, turn: 3 },
    { name: "c", load: 2, capacity: 4, turn: 2 },
  ];
  assert.equal(new Placement().choose(undefined, candidates), "a");
  assert.equal(new Placement().choose(undefined, candidates.slice(1)), "c");
});
