/**
 * The errors that the library throws, made from the `google.rpc.Status` that the server sends. The class follows the
 * status code, so that the same mistake throws the same class in every method. No `ConnectError` leaves this package.
 *
 * @module
 */
import { create, type Message } from "@bufbuild/protobuf";
import { anyPack, anyUnpack, durationMs } from "@bufbuild/protobuf/wkt";
import type { GenMessage } from "@bufbuild/protobuf/codegenv2";
import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "./gen/google/rpc/status_pb.js";
import type { Result } from "./results.js";

/** The names of google.rpc.Code, by number. */
const CODES = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;

/** The name of a gRPC status code. */
export type StatusCode = (typeof CODES)[number];

/** One field of a request that was refused. */
export interface FieldViolation {
  /** The path in the request's message, such as `sampling.top_p`. */
  readonly field: string;
  /** What to change. */
  readonly description: string;
}

/** What an error may be made with. */
export interface HeadraceErrorOptions {
  /** The whole status as it was received, with its details. */
  status?: Status | undefined;
  /** The request that it concerns. */
  requestId?: string | undefined;
  /** The output that had arrived before the request failed. */
  partial?: Result | undefined;
  /** What caused it. */
  cause?: unknown;
}

/** Base of all errors of this package. */
export class HeadraceError extends Error {
  /** The code of an error of this class that has no status. */
  static readonly code: StatusCode = "UNKNOWN";
  /** The gRPC status code. */
  readonly code: StatusCode;
  /** The server's machine-readable reason, such as `QUEUE_FULL`; empty if it gave none. */
  readonly reason: string;
  /** Additional named values that the server sent with the reason. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The fields that were refused; empty if the error is not about fields. */
  readonly fields: readonly FieldViolation[];
  /** Milliseconds after which to try again, if the server said so. */
  readonly retryAfterMs: number | undefined;
  /** The whole status as it was received, with its details. */
  readonly status: Status;
  /** Whether the server forbade another try of the call (a negative `grpc-retry-pushback-ms`). */
  isFinal = false;
  /** The request that it concerns; empty if that is not known. */
  requestId: string;
  /** The output that had arrived before the request failed, if it was streamed. */
  partial: Result | undefined;

  /** Applications need not make these. */
  constructor(message: string, options: HeadraceErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    const status = options.status ?? create(StatusSchema, { code: CODES.indexOf(new.target.code), message });
    const info = detail(status, ErrorInfoSchema);
    const delay = detail(status, RetryInfoSchema)?.retryDelay;
    this.status = status;
    this.code = codeName(status.code);
    this.reason = info?.reason ?? "";
    this.metadata = info?.metadata ?? {};
    this.fields = (detail(status, BadRequestSchema)?.fieldViolations ?? []).map(({ field, description }) => ({
      field,
      description,
    }));
    this.retryAfterMs = delay === undefined ? undefined : durationMs(delay);
    this.requestId = options.requestId ?? "";
    this.partial = options.partial;
  }

  /** The id of the cause in the server's log, which its operator can find; empty if it gave none. */
  get errorId(): string {
    return this.metadata["error_id"] ?? "";
  }

  /** Whether a Headrace server sent this error; otherwise it was made here, or on the way. */
  get fromServer(): boolean {
    return this.reason !== "" && this.metadata[LOCAL] === undefined;
  }
}

/** Marks the details of errors that are made here. */
const LOCAL = "client";

/** A field of the request is wrong; `fields` says which, and what to change. */
export class InvalidArgumentError extends HeadraceError {
  static override readonly code: StatusCode = "INVALID_ARGUMENT";
}

/** The events that were asked for are no longer kept, or an answer is too large for one message. */
export class OutOfRangeError extends HeadraceError {
  static override readonly code: StatusCode = "OUT_OF_RANGE";
}

/** The server does not support this (UNIMPLEMENTED). `Client.model` tells what it supports. */
export class NotSupportedError extends HeadraceError {
  static override readonly code: StatusCode = "UNIMPLEMENTED";
}

/** A request of that id is live, or its results are still kept. */
export class AlreadyExistsError extends HeadraceError {
  static override readonly code: StatusCode = "ALREADY_EXISTS";
}

/** No such request of this caller, or no such model, is on this server. */
export class NotFoundError extends HeadraceError {
  static override readonly code: StatusCode = "NOT_FOUND";
}

/** The server's configuration does not allow this, such as chat with a model that has no chat template. */
export class FailedPreconditionError extends HeadraceError {
  static override readonly code: StatusCode = "FAILED_PRECONDITION";
}

/** A queue or a limit of the server is full; `retryAfterMs` says when to try again. */
export class ResourceExhaustedError extends HeadraceError {
  static override readonly code: StatusCode = "RESOURCE_EXHAUSTED";
}

/** The server cannot be reached, was lost, or is loading, draining or restarting. */
export class UnavailableError extends HeadraceError {
  static override readonly code: StatusCode = "UNAVAILABLE";
}

/** The call's timeout passed. */
export class DeadlineExceededError extends HeadraceError {
  static override readonly code: StatusCode = "DEADLINE_EXCEEDED";
}

/** The server requires a token (or a certificate), which was missing or wrong. */
export class UnauthenticatedError extends HeadraceError {
  static override readonly code: StatusCode = "UNAUTHENTICATED";
}

/** The caller is known, and may not do this. */
export class PermissionDeniedError extends HeadraceError {
  static override readonly code: StatusCode = "PERMISSION_DENIED";
}

/** The call was cancelled; `cause` is the reason of the AbortSignal, if that was it. */
export class CancelledError extends HeadraceError {
  static override readonly code: StatusCode = "CANCELLED";
}

/** Another stream took the request over (`Session.attach`). */
export class RequestMovedError extends HeadraceError {
  static override readonly code: StatusCode = "ABORTED";
}

/** The server has a defect; its operator finds the cause by `errorId`. */
export class InternalError extends HeadraceError {
  static override readonly code: StatusCode = "INTERNAL";
}

/** The server's answer broke the contract: an event was missing, repeated or out of order. */
export class ProtocolError extends HeadraceError {
  static override readonly code: StatusCode = "DATA_LOSS";
}

const CLASSES: Partial<Record<StatusCode, new (message: string, options?: HeadraceErrorOptions) => HeadraceError>> = {
  INVALID_ARGUMENT: InvalidArgumentError,
  OUT_OF_RANGE: OutOfRangeError,
  UNIMPLEMENTED: NotSupportedError,
  ALREADY_EXISTS: AlreadyExistsError,
  NOT_FOUND: NotFoundError,
  FAILED_PRECONDITION: FailedPreconditionError,
  RESOURCE_EXHAUSTED: ResourceExhaustedError,
  UNAVAILABLE: UnavailableError,
  DEADLINE_EXCEEDED: DeadlineExceededError,
  UNAUTHENTICATED: UnauthenticatedError,
  PERMISSION_DENIED: PermissionDeniedError,
  CANCELLED: CancelledError,
  ABORTED: RequestMovedError,
  INTERNAL: InternalError,
  DATA_LOSS: ProtocolError,
};
for (const kind of Object.values(CLASSES)) {
  Object.defineProperty(kind.prototype, "name", { value: kind.name, configurable: true, writable: true });
}
Object.defineProperty(HeadraceError.prototype, "name", { value: "HeadraceError", configurable: true, writable: true });

/** The error for a status (of an event, or of a call). */
export function errorFromStatus(status: Status, options: Omit<HeadraceErrorOptions, "status"> = {}): HeadraceError {
  const code = codeName(status.code);
  const message = status.message || code.replaceAll("_", " ").toLowerCase();
  const kind = CLASSES[code];
  return kind === undefined
    ? new HeadraceError(message, { ...options, status })
    : new kind(message, { ...options, status });
}

/** What a call's failure is judged by, beside the failure itself. */
export interface CallContext {
  /** The server, for messages. */
  target: string;
  /** The signal of the call's user. */
  signal?: AbortSignal | undefined;
  /** The request. */
  requestId?: string | undefined;
  /** Its output so far. */
  partial?: Result | undefined;
}

/** The error for a call's end, with the details of its trailers if it has some. */
export function errorFromCall(failure: unknown, context: CallContext): HeadraceError {
  if (failure instanceof HeadraceError) {
    return failure;
  }
  if (failure instanceof Error && failure.cause instanceof HeadraceError) {
    return failure.cause; // of an interceptor of the library
  }
  const { requestId, partial } = context;
  const options = { requestId, partial, cause: failure };
  if (context.signal?.aborted) {
    return abortError(context.signal, options);
  }
  const error = ConnectError.from(failure);
  const status = error.metadata.has("grpc-status") ? statusOf(error) : undefined;
  if (status !== undefined) {
    const made = errorFromStatus(status, options);
    made.isFinal = (error.metadata.get("grpc-retry-pushback-ms") ?? "").trimStart().startsWith("-");
    return made;
  }
  // What has no status of the server's happened here or on the way.
  switch (error.code) {
    case Code.DeadlineExceeded:
    case Code.ResourceExhausted:
    case Code.Unauthenticated:
    case Code.PermissionDenied:
    case Code.Unimplemented:
      return errorFromStatus(create(StatusSchema, { code: error.code, message: error.rawMessage }), options);
    default:
      if (error.rawMessage.startsWith("parse binary")) {
        return new ProtocolError(`the server's answer cannot be read: ${error.rawMessage}`, options);
      }
      if (isForeign(error)) {
        return new HeadraceError(`the call failed: ${error.rawMessage}`, options);
      }
      return new UnavailableError(
        `cannot reach a Headrace server at ${context.target}: ${error.rawMessage || "connection lost"}`,
        options,
      );
  }
}

/** Whether an error comes neither from the connection nor from what reads it, but from code around the call. */
function isForeign(error: ConnectError): boolean {
  const { cause } = error;
  return cause instanceof Error && !(cause instanceof ConnectError) && !("code" in cause);
}

/** The error of a call that its user's signal ended. */
export function abortError(signal: AbortSignal, options: HeadraceErrorOptions = {}): HeadraceError {
  const cause: unknown = signal.reason;
  if (cause instanceof Error && cause.name === "TimeoutError") {
    return new DeadlineExceededError("the signal's time is over", { ...options, cause });
  }
  return new CancelledError("the call was aborted", { ...options, cause });
}

/** The error for a request whose results continue on another stream. */
export function movedError(requestId: string): HeadraceError {
  const message = `the results of request "${requestId}" moved to a stream that attached to it`;
  const info = create(ErrorInfoSchema, { domain: "headrace.dev", reason: "REQUEST_MOVED", metadata: { [LOCAL]: "1" } });
  const details = [anyPack(ErrorInfoSchema, info)];
  return errorFromStatus(create(StatusSchema, { code: Code.Aborted, message, details }), { requestId });
}

/** The error for a value that this client cannot even put in a message. */
export function invalidArgument(field: string, description: string): InvalidArgumentError {
  const message = `${field}: ${description}`;
  const violations = create(BadRequestSchema, { fieldViolations: [{ field, description }] });
  const details = [anyPack(BadRequestSchema, violations)];
  const status = create(StatusSchema, { code: Code.InvalidArgument, message, details });
  return new InvalidArgumentError(message, { status });
}

/** A copy of an error for one of several requests that it ends. */
export function copyOf(error: HeadraceError, options: HeadraceErrorOptions = {}): HeadraceError {
  return errorFromStatus(error.status, { cause: error, ...options });
}

function codeName(code: number): StatusCode {
  return CODES[code] ?? "UNKNOWN";
}

function statusOf(error: ConnectError): Status {
  const details = error.details.flatMap((one) =>
    "type" in one ? [{ typeUrl: `type.googleapis.com/${one.type}`, value: one.value }] : [],
  );
  return create(StatusSchema, { code: error.code, message: error.rawMessage, details });
}

function detail<T extends Message>(status: Status, schema: GenMessage<T>): T | undefined {
  try {
    for (const one of status.details) {
      const found = anyUnpack(one, schema);
      if (found !== undefined) {
        return found;
      }
    }
  } catch {
    // A detail that its sender spoiled is not worth another error.
  }
  return undefined;
}
