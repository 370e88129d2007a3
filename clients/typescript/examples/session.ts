// Runs prompts on one session and prints what comes back, as it comes.
//
//   node build/examples/session.js --target localhost:50051 --max-tokens 32 'Once upon a time' 'The old mill'
//
// Ctrl-C cancels the live requests and waits for their ends; a second Ctrl-C ends the program at once. The exit code is
// 1 if a request was refused or failed.
import { parseArgs } from "node:util";

import { Client, HeadraceError, type SessionRequest } from "@headrace/client";

async function print(request: SessionRequest, number: number): Promise<boolean> {
  try {
    for await (const chunk of request) {
      console.log(`[${number}] ${JSON.stringify(chunk.text)}`);
    }
    const { finishReason, usage } = await request.result();
    console.log(`[${number}] ${finishReason}, ${usage.completionTokens} tokens`);
    return true;
  } catch (error) {
    if (!(error instanceof HeadraceError)) {
      throw error;
    }
    console.error(`[${number}] ${error.code}: ${error.message}`);
    return false;
  }
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { target: { type: "string" }, "max-tokens": { type: "string", default: "32" } },
});
await using client = new Client(values.target);
await using session = client.session({ leaseMs: 30_000 });
const requests = positionals.map((prompt) => session.submit(prompt, { maxTokens: Number(values["max-tokens"]) }));
process.once("SIGINT", () => requests.forEach((request) => request.cancel()));
const ends = await Promise.all(requests.map((request, index) => print(request, index + 1)));
process.exitCode = ends.every(Boolean) ? 0 : 1;
