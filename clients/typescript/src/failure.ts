import { fromBinary } from "@bufbuild/protobuf";
import { type Any, durationMs } from "@bufbuild/protobuf/wkt";
import { ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";

/** The names of google.rpc.Code, by number. */
const CODE_NAMES = [
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
];

export function codeName(code: number): string {
  return CODE_NAMES[code] ?? String(code);
}

/** A detail of a status: an Any in a message, a pair of type name and value in an RPC's error. */
type Detail = Pick<Any, "typeUrl" | "value"> | { type: string; value: Uint8Array };

/** Makes an RPC's error readable. It carries the same google.rpc.Status as a rejection or a Failed event. */
export function describeError(error: unknown): string {
  const rpc = ConnectError.from(error);
  const details = rpc.details.filter((detail) => "type" in detail);
  return describe(rpc.code, rpc.rawMessage, details);
}

/** Tells a status in words: its code and message, then a line for each detail. */
export function describeStatus(status: Status | undefined): string {
  return describe(status?.code ?? 0, status?.message ?? "", status?.details ?? []);
}

function describe(code: number, message: string, details: readonly Detail[]): string {
  return [`${codeName(code)}: ${message}`, ...detailLines(details)].join("\n    ");
}

/** Tells each detail in a line: what Headrace sends in words, others by the name of their type. */
export function detailLines(details: readonly Detail[]): string[] {
  return details.flatMap((detail) => {
    const type = "type" in detail ? detail.type : detail.typeUrl.slice(detail.typeUrl.lastIndexOf("/") + 1);
    try {
      return knownDetailLines(type, detail.value) ?? [`detail: ${type}`];
    } catch {
      return [`detail: ${type}`]; // the value is no message of its type
    }
  });
}

function knownDetailLines(type: string, value: Uint8Array): string[] | undefined {
  switch (type) {
    case ErrorInfoSchema.typeName: {
      const { reason, domain, metadata } = fromBinary(ErrorInfoSchema, value);
      const pairs = Object.keys(metadata)
        .sort()
        .map((key) => ` ${key}=${metadata[key]}`);
      return [`reason: ${reason} (${domain})${pairs.join("")}`];
    }
    case BadRequestSchema.typeName:
      return fromBinary(BadRequestSchema, value).fieldViolations.map(
        ({ field, description }) => `field: ${field}: ${description}`,
      );
    case RetryInfoSchema.typeName: {
      const { retryDelay } = fromBinary(RetryInfoSchema, value);
      return [`retry after: ${retryDelay === undefined ? 0 : durationMs(retryDelay) / 1000}s`];
    }
    default:
      return undefined;
  }
}
