package dev.headrace.client;

import java.time.Duration;
import java.util.Optional;

/**
 * Times of a request, from its acceptance. A time is empty if it did not come to that.
 *
 * @param firstScheduled when it was first run
 * @param firstToken when its first token was there
 * @param lastToken when its last token was there
 * @param finished when it ended
 * @param preemptions how often it gave up its cache to others
 */
public record Timings(
    Optional<Duration> firstScheduled,
    Optional<Duration> firstToken,
    Optional<Duration> lastToken,
    Optional<Duration> finished,
    int preemptions) {
  static final Timings NONE =
      new Timings(Optional.empty(), Optional.empty(), Optional.empty(), Optional.empty(), 0);

  static Timings of(dev.headrace.v1.Timings told) {
    return new Timings(
        Durations.when(told.hasFirstScheduledDuration(), told.getFirstScheduledDuration()),
        Durations.when(told.hasFirstTokenDuration(), told.getFirstTokenDuration()),
        Durations.when(told.hasLastTokenDuration(), told.getLastTokenDuration()),
        Durations.when(told.hasFinishedDuration(), told.getFinishedDuration()),
        told.getPreemptions());
  }
}
