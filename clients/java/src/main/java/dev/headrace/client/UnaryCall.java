package dev.headrace.client;

import io.grpc.Context;
import io.grpc.MethodDescriptor;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/** A unary call that any server may answer, tried again where it may be. */
final class UnaryCall<Q, A> {
  private final Pool pool;
  private final MethodDescriptor<Q, A> method;
  private final Q request;
  private final String requestId;
  private final Attempts tries;
  private final Context context;
  private final Map<String, String> trace;
  private final CompletableFuture<Answer<A>> done = new CompletableFuture<>();

  /** An answer, and who gave it. */
  record Answer<A>(A message, Server from) {}

  private UnaryCall(
      Pool pool,
      MethodDescriptor<Q, A> method,
      Q request,
      String requestId,
      Attempts tries,
      Context context) {
    this.pool = pool;
    this.method = method;
    this.request = request;
    this.requestId = requestId;
    this.tries = tries;
    this.context = context;
    this.trace = TraceContext.current();
  }

  /** Begins the call. It fails with an error of this package's. */
  static <Q, A> CompletableFuture<Answer<A>> begin(
      Pool pool,
      MethodDescriptor<Q, A> method,
      Q request,
      String requestId,
      Attempts tries,
      Context context) {
    UnaryCall<Q, A> made = new UnaryCall<>(pool, method, request, requestId, tries, context);
    made.attempt();
    return made.done;
  }

  private void attempt() {
    tries
        .next(context)
        .whenComplete(
            (at, nobody) -> {
              if (nobody != null) {
                done.completeExceptionally(Futures.errorOf(nobody));
              } else {
                Calls.unary(at, method, request, context, trace, requestId)
                    .whenComplete((answer, failed) -> answered(at, answer, failed));
              }
            });
  }

  private void answered(Server at, A answer, Throwable failed) {
    pool.over(at);
    if (failed == null) {
      pool.succeeded();
      done.complete(new Answer<>(answer, at));
    } else if (pool.isClosed()) {
      done.completeExceptionally(HeadraceException.closed("the client"));
    } else {
      tries
          .failed(context, at, Futures.errorOf(failed))
          .whenComplete(
              (nothing, last) -> {
                if (last != null) {
                  done.completeExceptionally(Futures.errorOf(last));
                } else {
                  attempt();
                }
              });
    }
  }
}
