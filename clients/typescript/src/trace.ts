/**
 * The trace's context of where a call is made, if the application has OpenTelemetry.
 *
 * @module
 */
import { createRequire } from "node:module";

import type { GenerationSpec } from "./gen/headrace/v1/generation_pb.js";

const NAMES = new Set(["traceparent", "tracestate"]);
const MOST_LABELS = 16; // the contract's bounds
const MOST_BYTES = 128;

/** OpenTelemetry's API keeps what is set up for the process, so any copy of it will do; and it may be missing. */
const telemetry = load();

function load(): typeof import("@opentelemetry/api") | undefined {
  try {
    return createRequire(import.meta.url)("@opentelemetry/api") as typeof import("@opentelemetry/api");
  } catch {
    return undefined;
  }
}

/** The current context's headers (`traceparent`, `tracestate`); none if there is no span. */
export function traceContext(): Map<string, string> {
  const found = new Map<string, string>();
  telemetry?.propagation.inject(telemetry.context.active(), found, {
    set: (carrier, name, value) => carrier.set(name, value),
  });
  return found;
}

/**
 * Puts the context of a session's request in its labels, which the server heeds; the user's own stay. What would be
 * refused as a label is left out.
 */
export function labelTrace(spec: GenerationSpec): void {
  const taken = new Set(spec.labels.map(({ name }) => name));
  if (taken.has("traceparent")) {
    return;
  }
  for (const [name, value] of traceContext()) {
    const fits = spec.labels.length < MOST_LABELS && Buffer.byteLength(value) <= MOST_BYTES;
    if (fits && NAMES.has(name) && !taken.has(name)) {
      spec.labels.push({ $typeName: "headrace.v1.Label", name, value });
    }
  }
}
