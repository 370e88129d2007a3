package dev.headrace.client;

import io.grpc.Context;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Function;

/**
 * A unary call to the server that has a request: to the instance that an answer named; if none is
 * known, to one server after another. Its steps come one after the other.
 */
final class OwnerCall<Q, A> {
  private final Pool pool;
  private final MethodDescriptor<Q, A> method;
  private final Function<String, Q> request; // by the instance to name in it
  private final String id;
  private final Context context;
  private final Map<String, String> trace;
  private final CompletableFuture<A> done = new CompletableFuture<>();
  private int left;
  private String owner = ""; // the instance that has it; empty: none is known
  private List<Server> servers = List.of();
  private int pauses;
  private boolean followed;
  private HeadraceException problem;

  private OwnerCall(
      Pool pool,
      MethodDescriptor<Q, A> method,
      Function<String, Q> request,
      String id,
      int retries,
      Context context,
      Map<String, String> trace) {
    this.pool = pool;
    this.method = method;
    this.request = request;
    this.id = id;
    this.left = retries;
    this.context = context;
    this.trace = trace;
  }

  /** Begins the call. It fails with an error of this package's. */
  static <Q, A> CompletableFuture<A> begin(
      Pool pool,
      MethodDescriptor<Q, A> method,
      Function<String, Q> request,
      String id,
      int retries,
      Context context,
      Map<String, String> trace) {
    OwnerCall<Q, A> made = new OwnerCall<>(pool, method, request, id, retries, context, trace);
    CompletableFuture<Void> settled =
        pool.owner(id).isEmpty() ? pool.settle(context) : CompletableFuture.completedFuture(null);
    settled.whenComplete(
        (nothing, failed) -> {
          if (failed != null) {
            made.done.completeExceptionally(Futures.errorOf(failed));
          } else {
            made.find();
            made.attempt();
          }
        });
    return made.done;
  }

  private void find() {
    owner = pool.owner(id);
    if (owner.isEmpty()) {
      servers = pool.reachable();
    } else {
      servers = pool.byInstance(owner).stream().limit(1).toList();
    }
  }

  private void attempt() {
    HeadraceException nobody = nobody();
    if (nobody != null) {
      done.completeExceptionally(nobody);
      return;
    }
    Server at = servers.get(0);
    Calls.unary(at, method, request.apply(owner), context, trace, id)
        .whenComplete(
            (answer, failed) -> {
              if (failed == null) {
                done.complete(answer);
              } else {
                failed(at, Futures.errorOf(failed));
              }
            });
  }

  private HeadraceException nobody() {
    if (pool.isClosed()) {
      return HeadraceException.closed("the client");
    }
    if (!servers.isEmpty()) {
      return null;
    }
    if (problem != null) {
      return problem;
    }
    return owner.isEmpty() ? pool.nobody() : gone();
  }

  private void failed(Server at, HeadraceException error) {
    boolean hasOthers = owner.isEmpty() && pool.many;
    if (error.reason().equals(HeadraceException.REASON_WRONG_INSTANCE)) {
      follow(at, error);
    } else if (error.code() == Status.Code.NOT_FOUND && hasOthers) {
      goOn(problem == null ? error : problem);
    } else if (pool.isClosed()) {
      done.completeExceptionally(HeadraceException.closed("the client"));
    } else if (!error.isWorthARetry()) {
      done.completeExceptionally(error);
    } else if (left > 0) {
      left--;
      long pause =
          error
              .retryAfter()
              .map(Durations::nanos)
              .orElseGet(
                  () ->
                      (long)
                          (Attempts.pauseAfter(pauses++)
                              * ThreadLocalRandom.current().nextDouble()));
      pool.pause(context, pause)
          .whenComplete(
              (nothing, ended) -> {
                if (ended != null) {
                  done.completeExceptionally(Futures.errorOf(ended));
                } else {
                  attempt();
                }
              });
    } else if (hasOthers) {
      goOn(error); // it may be there: more than that it is nowhere else
    } else {
      done.completeExceptionally(error);
    }
  }

  /** Asks the next server. */
  private void goOn(HeadraceException why) {
    servers = servers.subList(1, servers.size());
    problem = why;
    attempt();
  }

  /** Looks once whether the owner has another address: this one has another process than it had. */
  private void follow(Server at, HeadraceException error) {
    synchronized (pool) {
      pool.noteInstance(at, error.metadata().getOrDefault("instance_id", ""));
      servers = pool.byInstance(owner).stream().filter(one -> one != at).toList();
    }
    if (followed || servers.isEmpty()) {
      done.completeExceptionally(gone());
      return;
    }
    followed = true;
    attempt();
  }

  private HeadraceException gone() {
    return HeadraceException.unavailable(
            "the server that had request " + id + " (instance " + owner + ") is gone")
        .forRequest(id);
  }
}
