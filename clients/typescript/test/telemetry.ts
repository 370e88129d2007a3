// The least of OpenTelemetry that a call's trace needs: contexts that follow asynchronous calls, and W3C's header.
import { AsyncLocalStorage } from "node:async_hooks";

import {
  type Context,
  context,
  propagation,
  ROOT_CONTEXT,
  type TextMapPropagator,
  createContextKey,
} from "@opentelemetry/api";

const TRACE = createContextKey("traceparent");
const storage = new AsyncLocalStorage<Context>();

const propagator: TextMapPropagator = {
  fields: () => ["traceparent"],
  inject: (active, carrier, setter) => {
    const found = active.getValue(TRACE);
    if (typeof found === "string") {
      setter.set(carrier, "traceparent", found);
    }
  },
  extract: (active) => active,
};

/** Runs a call with this trace as its current one; undefined: with none. */
export function traced<T>(traceparent: string | undefined, call: () => T): T {
  return traceparent === undefined ? call() : context.with(ROOT_CONTEXT.setValue(TRACE, traceparent), call);
}

/** Sets it up for the process. */
export function useTelemetry(): void {
  propagation.setGlobalPropagator(propagator);
  context.setGlobalContextManager({
    active: () => storage.getStore() ?? ROOT_CONTEXT,
    with: (active, call, that, ...rest) => storage.run(active, () => call.apply(that, rest)),
    bind: (_, target) => target,
    enable() {
      return this;
    },
    disable() {
      return this;
    },
  });
}
