// Asks a question that the model may answer with a tool, which is a function of this program.
//
//   node dist/tools.js --target localhost:50051 'How high is the Danube in Ulm?'
//   node dist/tools.js --tool-choice required 'How high is the Danube in Ulm?'
//
// The question is sent with the tool's definition. The reply is streamed: its text is printed as it comes, and the
// fragments of its tool calls are joined. The calls are run, the reply and what they returned are added to the
// conversation, and it is sent again, until a reply calls no tool. The answer's text goes to the standard output, the
// calls to the standard error. The exit code is 1 if a request was refused or failed, or a reply was cut within a call.
import { connect } from "node:net";
import { parseArgs } from "node:util";

import { create } from "@bufbuild/protobuf";
import { type Client, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { describeError } from "./failure.js";
import {
  type ChatInput,
  ChatInputSchema,
  type ChatMessage,
  ChatMessageSchema,
  ChatRole,
  FinishReason,
  ToolCallSchema,
  ToolChoiceMode,
  ToolChoiceSchema,
} from "./gen/headrace/v1/generation_pb.js";
import { GenerationService } from "./gen/headrace/v1/generation_service_pb.js";

/** How often the model may call tools before the program gives up. */
const MAX_REPLIES = 5;

/** The tool as the chat template shows it to the model. */
const DEFINITION = {
  type: "function",
  function: {
    name: "read_gauge",
    description: "How high a river is.",
    parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
  },
};

const MODES = new Map([
  ["auto", ToolChoiceMode.AUTO],
  ["none", ToolChoiceMode.NONE],
  ["required", ToolChoiceMode.REQUIRED],
]);

/** The tool itself: from the JSON text of a call's arguments to what the model is told. */
function readGauge(argumentsJson: string): string {
  try {
    const { place } = JSON.parse(argumentsJson) as { place: string };
    return `${place}: ${Buffer.byteLength(place)} m`;
  } catch (error) {
    return `error: ${String(error)}`; // the model may try again
  }
}

/** Streams one reply: prints its text, and returns the whole as a message for the conversation's next turn. */
async function generate(
  client: Client<typeof GenerationService>,
  chat: ChatInput,
  requiredCapabilities: string[],
): Promise<{ reply: ChatMessage; reason: FinishReason }> {
  const reply = create(ChatMessageSchema, { role: ChatRole.ASSISTANT });
  let text = "";
  let reason = FinishReason.UNSPECIFIED;
  const spec = { input: { case: "chat", value: chat }, stop: { maxTokens: 1024 } } as const;
  for await (const { events } of client.generateStream({ spec, requiredCapabilities })) {
    for (const { event } of events) {
      if (event.case === "finished") {
        reason = event.value.reason;
      }
      if (event.case !== "delta") {
        continue;
      }
      process.stdout.write(event.value.text);
      text += event.value.text;
      reply.reasoningContent += event.value.reasoning;
      for (const { index, id, name, argumentsJson } of event.value.toolCalls) {
        // A call's first part has the id and the name.
        const call = (reply.toolCalls[index] ??= create(ToolCallSchema, { id, name }));
        call.argumentsJson += argumentsJson;
      }
    }
  }
  if (text !== "") {
    process.stdout.write("\n");
    reply.contentKind = { case: "content", value: text };
  }
  return { reply, reason };
}

async function run(target: string, choice: string | undefined, question: string): Promise<void> {
  const path = target.startsWith("unix:") ? target.slice("unix:".length) : undefined;
  const client = createClient(
    GenerationService,
    createGrpcTransport({
      baseUrl: path === undefined ? `http://${target}` : "http://localhost",
      ...(path === undefined ? {} : { nodeOptions: { createConnection: () => connect(path) } }),
    }),
  );
  const chat = create(ChatInputSchema, {
    messages: [{ role: ChatRole.USER, contentKind: { case: "content", value: question } }],
    tools: [{ definitionJson: JSON.stringify(DEFINITION) }],
  });
  // A server that cannot do this refuses the request by the capability's name, instead of doing something else.
  const capabilities = ["chat", "tools", "typed_replies"];
  if (choice !== undefined) {
    const mode = MODES.get(choice);
    if (mode === undefined) {
      throw new Error(`there is no tool choice "${choice}"`);
    }
    chat.toolChoice = create(ToolChoiceSchema, { mode });
    capabilities.push("tool_choice");
  }
  for (let replies = 0; replies < MAX_REPLIES; replies++) {
    const { reply, reason } = await generate(client, chat, capabilities);
    if (reply.toolCalls.length === 0) {
      return;
    }
    if (reason !== FinishReason.TOOL_CALLS) {
      throw new Error(`the reply ended with ${FinishReason[reason]}: its calls may not be whole`);
    }
    chat.messages.push(reply);
    for (const { id, name, argumentsJson } of reply.toolCalls) {
      const answer = readGauge(argumentsJson);
      console.error(`${name} ${argumentsJson}: ${answer}`);
      chat.messages.push(
        create(ChatMessageSchema, {
          role: ChatRole.TOOL,
          toolCallId: id,
          contentKind: { case: "content", value: answer },
        }),
      );
    }
    if (chat.toolChoice?.mode === ToolChoiceMode.REQUIRED) {
      chat.toolChoice.mode = ToolChoiceMode.AUTO; // it was called; now the model may answer
    }
  }
  throw new Error(`the model calls tools again after ${MAX_REPLIES} replies`);
}

try {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { target: { type: "string", default: "localhost:50051" }, "tool-choice": { type: "string" } },
  });
  await run(values.target, values["tool-choice"], positionals.join(" "));
} catch (error) {
  console.error(`tools: ${describeError(error)}`);
  process.exitCode = 1;
}
