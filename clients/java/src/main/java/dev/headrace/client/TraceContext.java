package dev.headrace.client;

import dev.headrace.v1.GenerationSpec;
import dev.headrace.v1.Label;
import io.opentelemetry.api.trace.propagation.W3CTraceContextPropagator;
import io.opentelemetry.context.Context;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** The W3C trace context of a call, where the application has OpenTelemetry and a current span. */
final class TraceContext {
  private TraceContext() {}

  // The contract's bounds of labels.
  private static final int MOST_LABELS = 16;
  private static final int MOST_LABEL_CHARACTERS = 128;

  static final List<String> NAMES = List.of("traceparent", "tracestate");

  private static final boolean IS_THERE = isThere();

  private static boolean isThere() {
    try {
      Class.forName(
          "io.opentelemetry.api.trace.propagation.W3CTraceContextPropagator",
          false,
          TraceContext.class.getClassLoader());
      return true;
    } catch (ClassNotFoundException | LinkageError without) {
      return false;
    }
  }

  /** The calling thread's, by the names of its headers. */
  static Map<String, String> current() {
    return IS_THERE ? OpenTelemetry.current() : Map.of();
  }

  /** Is loaded only where its classes are there. */
  private static final class OpenTelemetry {
    static Map<String, String> current() {
      Map<String, String> found = new TreeMap<>();
      W3CTraceContextPropagator.getInstance()
          .inject(Context.current(), found, (into, name, value) -> into.put(name, value));
      return found;
    }
  }

  /**
   * Puts it in the labels of a request that goes over a session, whose one call brings requests of
   * many callers. What the server would refuse as a label is left out: the request matters more
   * than its trace.
   */
  static GenerationSpec label(GenerationSpec spec) {
    Map<String, String> trace = current();
    if (trace.isEmpty()
        || spec.getLabelsList().stream().anyMatch(one -> one.getName().equals(NAMES.get(0)))) {
      return spec;
    }
    GenerationSpec.Builder made = spec.toBuilder();
    for (String name : NAMES) {
      String value = trace.getOrDefault(name, "");
      if (!value.isEmpty()
          && value.length() <= MOST_LABEL_CHARACTERS
          && made.getLabelsCount() < MOST_LABELS) {
        made.addLabels(Label.newBuilder().setName(name).setValue(value));
      }
    }
    return made.build();
  }
}
