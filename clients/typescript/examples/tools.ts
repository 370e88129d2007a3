// Asks a question that the model may answer with a tool, which is a function of this program.
//
//   node build/examples/tools.js --target localhost:50051 'How high is the Danube in Ulm?'
//   node build/examples/tools.js --tool-choice required 'How high is the Danube in Ulm?'
//
// The replies' texts go to the standard output, the calls to the standard error. The exit code is 1 if a request was
// refused or failed, or a reply was cut.
import { parseArgs } from "node:util";

import { Client, HeadraceError, type RunnableTool, type ToolChoiceName } from "@headrace/client";

const readGauge: RunnableTool = {
  name: "read_gauge",
  description: "How high a river is.",
  parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
  run: ({ place }) => `${Buffer.byteLength(String(place))} m`,
};

async function run(target: string | undefined, toolChoice: ToolChoiceName | undefined, question: string) {
  await using client = new Client(target);
  const messages = [{ role: "user", content: question }] as const;
  const options = { toolChoice, maxTurns: 5, temperature: 0 };
  for await (const { result, answers, end } of client.runTools(messages, [readGauge], options)) {
    if (result.text !== "") {
      console.log(result.text);
    }
    for (const { call, content } of answers) {
      console.error(`${call.name} ${call.arguments}: ${content}`);
    }
    if (end === "cut" || end === "max_turns") {
      throw new HeadraceError(end === "cut" ? "the reply was cut: its calls may not be whole" : "the model calls on");
    }
  }
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { target: { type: "string" }, "tool-choice": { type: "string" } },
});
try {
  await run(values.target, values["tool-choice"] as ToolChoiceName | undefined, positionals.join(" "));
} catch (error) {
  if (!(error instanceof HeadraceError)) {
    throw error;
  }
  console.error(`tools: ${error.message}`);
  process.exitCode = 1;
}
