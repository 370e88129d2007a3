package dev.headrace.client;

import java.time.Duration;
import java.util.Optional;

/** Durations of the contract's messages and of Java. */
final class Durations {
  private Durations() {}

  static Duration from(com.google.protobuf.Duration told) {
    return Duration.ofSeconds(told.getSeconds(), told.getNanos());
  }

  static Optional<Duration> when(boolean has, com.google.protobuf.Duration told) {
    return has ? Optional.of(from(told)) : Optional.empty();
  }

  static com.google.protobuf.Duration to(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  /** In nanoseconds; what is longer than 292 years counts as that. */
  static long nanos(Duration duration) {
    try {
      return duration.toNanos();
    } catch (ArithmeticException tooLong) {
      return duration.isNegative() ? Long.MIN_VALUE : Long.MAX_VALUE;
    }
  }
}
