// Plays turns of load for the comparison of the client libraries; benchmarks/languages says what a turn is.
//
//   node build/conformance/load.js TARGET SESSIONS REQUESTS TOKENS
import { createInterface } from "node:readline";

import { Client, type SessionRequest } from "@headrace/client";

async function count(request: SessionRequest): Promise<number> {
  let tokens = 0;
  for await (const chunk of request) {
    tokens += chunk.tokenIds.length;
  }
  return tokens;
}

const [target = "", ...numbers] = process.argv.slice(2);
const [sessions = 1, requests = 1, maxTokens = 1] = numbers.map(Number);
await using client = new Client(target);
for await (const _ of createInterface({ input: process.stdin })) {
  const opened = Array.from({ length: sessions }, () => client.session());
  const options = { maxTokens, ignoreEos: true, temperature: 0 };
  const submitted = opened.flatMap((session) =>
    Array.from({ length: requests }, () => session.submit("Once upon a time", options)),
  );
  const counts = await Promise.all(submitted.map(count));
  await Promise.all(opened.map((session) => session.close()));
  console.log(JSON.stringify({ tokens: counts.reduce((sum, one) => sum + one, 0) }));
}
