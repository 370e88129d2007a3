// A scripted server in this process, and the events that it sends.
import { once } from "node:events";
import {
  createSecureServer,
  createServer,
  type Http2SecureServer,
  type Http2Server,
  type SecureServerOptions,
  type ServerHttp2Session,
} from "node:http2";
import type { AddressInfo } from "node:net";

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, type HandlerContext, type ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  type AddCommand,
  ControlService,
  type DeltaSchema,
  FinishReason,
  GenerationService,
  ModelService,
  type ResultEventSchema,
  type StreamResultRequest,
  type StreamResultResponseSchema,
} from "@headrace/client/contract";

import { HealthCheckResponse_ServingStatus, Health } from "#lib/gen/grpc/health/v1/health_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "#lib/gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "#lib/gen/google/rpc/status_pb.js";

export type Event = MessageInitShape<typeof ResultEventSchema>;
export type Answer = MessageInitShape<typeof StreamResultResponseSchema>;
type Generation = Partial<ServiceImpl<typeof GenerationService>>;

/** What a server has besides. */
interface ServerOptions {
  models?: Partial<ServiceImpl<typeof ModelService>>;
  control?: Partial<ServiceImpl<typeof ControlService>>;
  tls?: SecureServerOptions;
}

/** A server on a free port. */
export class ScriptedServer implements AsyncDisposable {
  readonly connections = new Set<ServerHttp2Session>();
  readonly #server: Http2Server | Http2SecureServer;

  private constructor(server: Http2Server | Http2SecureServer) {
    this.#server = server;
  }

  static async start(generation: Generation, options: ServerOptions = {}) {
    const { models = {}, control = {}, tls } = options;
    const handler = connectNodeAdapter({
      routes: (router) => {
        router.service(GenerationService, generation);
        router.service(ModelService, models);
        router.service(ControlService, control);
        router.service(Health, { check: () => ({ status: HealthCheckResponse_ServingStatus.SERVING }) });
      },
    });
    const server = tls === undefined ? createServer(handler) : createSecureServer(tls, handler);
    const scripted = new ScriptedServer(server);
    server.on("session", (session: ServerHttp2Session) => {
      scripted.connections.add(session);
      session.once("close", () => scripted.connections.delete(session));
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    return scripted;
  }

  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  get target(): string {
    return `127.0.0.1:${this.port}`;
  }

  /** Breaks all connections. */
  cut(): void {
    for (const session of this.connections) {
      session.destroy();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.cut();
    this.#server.close();
    await once(this.#server, "close");
  }
}

/** The events of one request, numbered. */
export class Events {
  #seq = 0n;

  constructor(
    readonly requestId: string,
    readonly commandId = 0n,
    readonly requestNumber = 0,
  ) {}

  accepted(n = 1): Event {
    const { requestId, commandId } = this;
    return this.event({ case: "accepted", value: { requestId, commandId, n, sampling: { seed: 2n ** 63n - 1n } } });
  }

  delta(value: MessageInitShape<typeof DeltaSchema>, choiceIndex = 0): Event {
    return { ...this.event({ case: "delta", value }), choiceIndex };
  }

  text(text: string): Event {
    return this.delta({ text, tokenIds: [...Buffer.from(text)] });
  }

  finished(reason = FinishReason.STOP, choiceIndex = 0): Event {
    const usage = { promptTokens: 1, completionTokens: 1 };
    return { ...this.event({ case: "finished", value: { reason, usage } }), choiceIndex };
  }

  failed(failure: Status): Event {
    return this.event({ case: "failed", value: { status: failure } });
  }

  event(event: NonNullable<Event["event"]>): Event {
    this.#seq += 1n;
    return { requestNumber: this.requestNumber, seq: this.#seq, event };
  }
}

/** A whole answer to an `add`. */
export function wholeAnswer(commandId: bigint, add: AddCommand, number: number, ...texts: string[]): Event[] {
  const events = new Events(add.spec?.requestId ?? "", commandId, number);
  return [events.accepted(), ...texts.map((text) => events.text(text)), events.finished()];
}

/** A status with the details that Headrace sends. */
export function status(code: Code, reason: string, options: { retryMs?: number; field?: string } = {}): Status {
  const info = create(ErrorInfoSchema, { domain: "headrace.dev", reason, metadata: { error_id: "e1" } });
  const details = [anyPack(ErrorInfoSchema, info)];
  if (options.retryMs !== undefined) {
    const retry = create(RetryInfoSchema, { retryDelay: durationFromMs(options.retryMs) });
    details.push(anyPack(RetryInfoSchema, retry));
  }
  if (options.field !== undefined) {
    const fieldViolations = [{ field: options.field, description: "is wrong" }];
    details.push(anyPack(BadRequestSchema, create(BadRequestSchema, { fieldViolations })));
  }
  return create(StatusSchema, { code, message: `refused: ${reason}`, details });
}

/** The same as the end of a call. */
export function failure(code: Code, reason: string, options: { retryMs?: number; field?: string } = {}): ConnectError {
  const { message, details } = status(code, reason, options);
  const error = new ConnectError(message, code);
  error.details = details.map(({ typeUrl, value }) => ({ type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1), value }));
  return error;
}

/** A session whose commands are answered one by one. */
export function session(
  answer: (command: StreamResultRequest, context: HandlerContext) => Iterable<Answer> | AsyncIterable<Answer>,
): Generation {
  return {
    async *streamResult(commands, context) {
      for await (const command of commands) {
        yield* answer(command, context);
      }
    },
  };
}
