package dev.headrace.client;

import io.grpc.Context;
import io.grpc.Status;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * A wait that holds no thread. It completes when its time has passed or somebody completes it, and
 * fails when its context ends.
 */
final class Pause extends CompletableFuture<Void> implements Context.CancellationListener {
  static Pause begin(ScheduledExecutorService timer, Context context, long nanos) {
    Pause made = new Pause();
    Future<?> end = timer.schedule(() -> made.complete(null), nanos, TimeUnit.NANOSECONDS);
    context.addListener(made, Runnable::run);
    made.whenComplete(
        (nothing, ended) -> {
          end.cancel(false);
          context.removeListener(made);
        });
    return made;
  }

  @Override
  public void cancelled(Context context) {
    completeExceptionally(endOf(context));
  }

  /** The error for a wait that the caller's context ended. */
  static HeadraceException endOf(Context context) {
    Throwable cause = context.cancellationCause();
    if (cause instanceof HeadraceException known) {
      return known;
    }
    boolean isLate = cause instanceof TimeoutException;
    return HeadraceException.of(
        isLate ? Status.Code.DEADLINE_EXCEEDED : Status.Code.CANCELLED,
        isLate ? "the deadline has passed" : "the call was cancelled",
        HeadraceException.Origin.CALLER);
  }
}
