/**
 * The client of Headrace, a gRPC service for text generation.
 *
 * @packageDocumentation
 */
export type { BatchInput, BatchOptions, BatchOutcome, BatchRequest } from "./batch.js";
export type { CancelStatus } from "./by_id.js";
export { Client, type ClientOptions, type GenerateOptions, type HealthStatus } from "./client.js";
export type { CallOptions, ConnectionOptions, Metadata, TlsOptions } from "./connection.js";
export { Control, type LoadAdapterOptions, type UnloadAdapterOptions } from "./control.js";
export {
  AlreadyExistsError,
  CancelledError,
  DeadlineExceededError,
  FailedPreconditionError,
  type FieldViolation,
  HeadraceError,
  type HeadraceErrorOptions,
  InternalError,
  InvalidArgumentError,
  NotFoundError,
  NotSupportedError,
  OutOfRangeError,
  PermissionDeniedError,
  ProtocolError,
  RequestMovedError,
  ResourceExhaustedError,
  type StatusCode,
  UnauthenticatedError,
  UnavailableError,
} from "./errors.js";
export type { Status } from "./gen/google/rpc/status_pb.js";
export { type GenerationSpec, GenerationSpecSchema } from "./gen/headrace/v1/generation_pb.js";
export type { Adapter, ModelCard } from "./gen/headrace/v1/model_service_pb.js";
export type * from "./messages.js";
export type {
  ChatParameters,
  GenerationOptions,
  OutputParameters,
  SamplingParameters,
  StopParameters,
  StructuredParameters,
} from "./options.js";
export {
  type Accepted,
  type Choice,
  type Chunk,
  type FinishReason,
  type PromptInfo,
  Result,
  type ServerLoad,
  type Timings,
  type TokenCandidate,
  type TokenInfo,
  type Tokenization,
  type ToolCallChunk,
  type Usage,
} from "./results.js";
export { Session, type SessionOptions, SessionRequest, type WaitOptions } from "./session.js";
export { RequestStream } from "./stream.js";
export type { RunnableTool, ToolAnswer, ToolRunOptions, ToolTurn } from "./tool_run.js";
