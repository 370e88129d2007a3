// Runs prompts on one StreamResult session of a Headrace server and prints what comes back.
//
//   node dist/session.js --target localhost:50051 --max-tokens 32 'Once upon a time' 'The old mill'
//   node dist/session.js --target unix:/run/headrace.sock < prompts.txt
//
// The prompts are the arguments; without arguments, the lines of the standard input, each sent as it is read. After
// the last one the session is half-closed: the server finishes what was sent, then ends the stream. Ctrl-C cancels
// the live requests and waits for their ends; a second Ctrl-C ends the program at once.
//
// Every output is one line, prefixed with the request's number:
//
//   [1] " there was"
//   [1] finished: LENGTH (4 prompt tokens, 0 of them cached; 32 tokens)
//
// With --json there is one JSON line for each request instead, in the order of sending, when all have ended.
//
// The exit code is 0 if every request finished (or was cancelled by Ctrl-C), and 1 if one was refused or failed, the
// stream broke, or the server broke the contract: an event's number was missing or came twice, or a request had no
// end; 2 for wrong flags. What went wrong is told on the standard error. A line that is not UTF-8 and a line of more
// than 4 MiB are told and not sent, and make the exit code 1. When the output cannot be written, the program ends.
import { randomBytes } from "node:crypto";
import { connect } from "node:net";
import { parseArgs } from "node:util";

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { type Client, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { describeError } from "./failure.js";
import {
  GenerationService,
  type StreamResultRequest,
  StreamResultRequestSchema,
} from "./gen/headrace/v1/generation_service_pb.js";
import { readLines } from "./input.js";
import { Ledger } from "./ledger.js";

const USAGE = `usage: session [flags] [prompt ...]
Without prompts, each line of the standard input is one.
  --json                     print one JSON line for each request, at the end
  --max-tokens tokens        the most tokens to generate (default: the server's)
  --target address           the server's address: host:port or unix:/path (default "localhost:50051")
  --temperature temperature  the sampling temperature; 0: greedy (default: the model's)`;

/** The largest message that is received: one message carries a whole step's results, or more, merged. */
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

/** The most ids that one Cancel takes. */
const MAX_CANCEL_IDS = 1024;

/** The program's flags. What is undefined is left to the server. */
interface Options {
  target: string;
  maxTokens: number | undefined;
  temperature: number | undefined;
  json: boolean;
}

function parseFlags(): { options: Options; prompts: string[] } {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      help: { type: "boolean", short: "h", default: false },
      json: { type: "boolean", default: false },
      "max-tokens": { type: "string" },
      target: { type: "string", default: "localhost:50051" },
      temperature: { type: "string" },
    },
  });
  if (values.help) {
    console.log(USAGE);
    process.exit(0);
  }
  const options = {
    target: values.target,
    maxTokens: parseNumber("max-tokens", values["max-tokens"]),
    temperature: parseNumber("temperature", values.temperature),
    json: values.json,
  };
  const { maxTokens = 0 } = options;
  if (!Number.isInteger(maxTokens) || maxTokens < 0 || maxTokens >= 2 ** 32) {
    throw new TypeError(`--max-tokens: not a number from 0 to ${2 ** 32 - 1}`);
  }
  return { options, prompts: positionals };
}

function parseNumber(flag: string, value: string | undefined): number | undefined {
  if (value === undefined) {
    return undefined;
  }
  const parsed = value.trim() === "" ? Number.NaN : Number(value);
  if (Number.isNaN(parsed)) {
    throw new TypeError(`--${flag}: not a number`);
  }
  return parsed;
}

function createGenerationClient(target: string): Client<typeof GenerationService> {
  // unix:/path and unix:///path are the same, as in gRPC's own names.
  const path = target.startsWith("unix:") ? target.slice("unix:".length).replace(/^\/\/\//, "/") : undefined;
  return createClient(
    GenerationService,
    createGrpcTransport({
      baseUrl: path === undefined ? `http://${target}` : "http://localhost",
      ...(path === undefined ? {} : { nodeOptions: { createConnection: () => connect(path) } }),
      readMaxBytes: MAX_MESSAGE_BYTES,
      pingIntervalMs: 60_000,
      pingTimeoutMs: 20_000,
    }),
  );
}

/** Holds one session from its first request to its last event; returns the exit code. */
async function run(options: Options, prompts: string[]): Promise<number> {
  const client = createGenerationClient(options.target);
  // Ids are made here, not by the server, so that a request can be cancelled before it was accepted.
  const ledger = new Ledger(`session-${randomBytes(5).toString("hex")}`, options.json);
  const reads = prompts.length === 0;
  const inputs = reads ? readLines(process.stdin, (line) => ledger.broken(line)) : prompts;

  // Nothing aborts the RPC: an aborted stream counts as lost, and the requests' ends would not be received. The
  // interrupt becomes `cancel`, and the second one finds no handler any more.
  const interrupt = new AbortController();
  let halfClosed = false;
  const closeInput = (): void => {
    if (reads) {
      process.stdin.destroy();
    }
  };
  process.once("SIGINT", () => {
    interrupt.abort();
    closeInput();
    if (halfClosed) {
      void cancelAfterHalfClose(client, ledger);
    }
  });

  // The session's commands: an add for each input, then, after an interrupt, a cancel for each live request. The
  // generator's end half-closes the stream.
  async function* commands(): AsyncGenerator<StreamResultRequest> {
    for await (const prompt of inputs) {
      if (interrupt.signal.aborted) {
        break;
      }
      yield addCommand(options, ledger.add(), prompt);
    }
    if (interrupt.signal.aborted) {
      for (const id of ledger.live()) {
        yield cancelCommand(id);
      }
    }
    halfClosed = true;
  }

  let broken = false;
  try {
    for await (const response of client.streamResult(commands())) {
      ledger.take(response);
    }
  } catch (error) {
    broken = true;
    console.error(`session: ${describeError(error)}`);
  }
  // The server may have ended the stream while there was still input to read.
  closeInput();
  const complete = ledger.close();
  return complete && !broken ? 0 : 1;
}

/**
 * Cancels the live requests by the Cancel RPC: a stream that was half-closed takes no more commands. Their ends arrive
 * on the stream all the same.
 */
async function cancelAfterHalfClose(client: Client<typeof GenerationService>, ledger: Ledger): Promise<void> {
  const ids = ledger.live();
  try {
    for (let start = 0; start < ids.length; start += MAX_CANCEL_IDS) {
      await client.cancel({ requestIds: ids.slice(start, start + MAX_CANCEL_IDS) });
    }
  } catch (error) {
    console.error(`session: cancel: ${describeError(error)}`);
  }
}

function addCommand(
  options: Options,
  { commandId, requestId }: { commandId: bigint; requestId: string },
  prompt: string,
): StreamResultRequest {
  const spec = {
    requestId,
    input: { case: "text", value: { text: prompt } },
    ...(options.temperature === undefined ? {} : { sampling: { temperature: options.temperature } }),
    ...(options.maxTokens === undefined ? {} : { stop: { maxTokens: options.maxTokens } }),
  } as const;
  return command({ commandId, command: { case: "add", value: { spec } } });
}

function cancelCommand(requestId: string): StreamResultRequest {
  return command({ command: { case: "cancel", value: { requestId } } });
}

function command(init: MessageInitShape<typeof StreamResultRequestSchema>): StreamResultRequest {
  return create(StreamResultRequestSchema, init);
}

// Nobody would learn what follows: the program ends, without the trace that an event without a listener makes.
process.stdout.on("error", (error) => {
  console.error(`session: standard output: ${error.message}`);
  process.exit(1);
});
process.stderr.on("error", () => process.exit(1));

let flags: ReturnType<typeof parseFlags>;
try {
  flags = parseFlags();
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  console.error(USAGE);
  process.exit(2);
}
process.exitCode = await run(flags.options, flags.prompts);
