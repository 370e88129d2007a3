package dev.headrace.client;

import io.grpc.Status;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;

/** Waits for futures, and what they fail with. */
final class Futures {
  private Futures() {}

  /** What a future failed with, which is always an error of this package's. */
  static HeadraceException errorOf(Throwable failed) {
    Throwable cause = failed;
    while ((cause instanceof CompletionException || cause instanceof ExecutionException)
        && cause.getCause() != null) {
      cause = cause.getCause();
    }
    if (cause instanceof HeadraceException known) {
      return known;
    }
    Status.Code code =
        cause instanceof CancellationException ? Status.Code.CANCELLED : Status.Code.INTERNAL;
    return HeadraceException.of(code, String.valueOf(cause), HeadraceException.Origin.CALLER);
  }

  /** Waits for a future; an interrupt gives it up. */
  static <T> T await(CompletableFuture<T> future) {
    try {
      return future.get();
    } catch (InterruptedException asked) {
      future.cancel(true);
      throw interrupted("");
    } catch (ExecutionException | CancellationException failed) {
      throw errorOf(failed).thrownHere();
    }
  }

  /** The error for a thread that was interrupted while it waited; it stays interrupted. */
  static HeadraceException interrupted(String requestId) {
    Thread.currentThread().interrupt();
    return HeadraceException.of(
            Status.Code.CANCELLED,
            "the thread was interrupted while it waited",
            HeadraceException.Origin.CALLER)
        .forRequest(requestId);
  }
}
