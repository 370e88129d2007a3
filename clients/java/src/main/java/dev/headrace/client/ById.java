package dev.headrace.client;

import dev.headrace.v1.CancelRequest;
import dev.headrace.v1.CancelResponse;
import dev.headrace.v1.CancelResult;
import dev.headrace.v1.GenerationServiceGrpc;
import dev.headrace.v1.GetResultRequest;
import dev.headrace.v1.GetResultResponse;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Calls about requests by their ids: their results and their cancels. */
final class ById {
  /** How long a GetResult waits: proxies cut quiet calls. */
  static final Duration POLL_WAIT = Duration.ofSeconds(30);

  private static final int MOST_IDS = 1024; // of one Cancel

  private final Pool pool;
  private final Settings settings;

  ById(Pool pool, Settings settings) {
    this.pool = pool;
    this.settings = settings;
  }

  // ---- results
  // -----------------------------------------------------------------------------------

  /** Reads the next events of a request, at the server that has it. */
  CompletableFuture<GetResultResponse> read(
      Context context, String id, long from, boolean untilDone, Map<String, String> trace) {
    Duration wait = POLL_WAIT;
    Deadline deadline = context.getDeadline();
    if (deadline != null) {
      long left = Math.max(deadline.timeRemaining(TimeUnit.NANOSECONDS), 0);
      wait = left < wait.toNanos() ? Duration.ofNanos(left) : wait;
    }
    GetResultRequest.Builder request =
        GetResultRequest.newBuilder()
            .setRequestId(id)
            .setFromSeq(from)
            .setUntilDone(untilDone)
            .setWait(Durations.to(wait));
    Context.CancellableContext bounded = settings.bounded(context, wait, pool.timer);
    return OwnerCall.begin(
            pool,
            GenerationServiceGrpc.getGetResultMethod(),
            owner -> request.clone().setInstanceId(owner).build(),
            id,
            settings.retries,
            bounded,
            trace)
        .whenComplete(
            (answer, failed) -> {
              bounded.cancel(null);
              if (failed == null) {
                pool.noteOwner(id, answer.getInstanceId());
                if (answer.getDone()) {
                  pool.endedAlone(id);
                }
              }
            });
  }

  /** Waits for the end of a request that runs without a stream. */
  CompletableFuture<Result> result(Context context, Fold fold, Map<String, String> trace) {
    return read(context, fold.id(), fold.next(), true, trace)
        .thenCompose(
            answer -> {
              fold.setInstance(answer.getInstanceId());
              answer.getEventsList().forEach(fold::add);
              if (!answer.getDone() && !fold.isDone()) {
                return result(context, fold, trace);
              }
              return fold.error() == null
                  ? CompletableFuture.completedFuture(fold.partial())
                  : CompletableFuture.failedFuture(fold.error());
            });
  }

  // ---- cancels
  // -----------------------------------------------------------------------------------

  /** Ends requests, and tells what it found of each. */
  CompletableFuture<Map<String, CancelStatus>> cancel(Context context, Collection<String> ids) {
    List<String> unique = List.copyOf(new TreeSet<>(ids));
    Map<String, CancelStatus> statuses = new TreeMap<>();
    Map<String, String> trace = TraceContext.current();
    CompletableFuture<Void> chain = CompletableFuture.completedFuture(null);
    for (int i = 0; i < unique.size(); i += MOST_IDS) {
      List<String> some = unique.subList(i, Math.min(i + MOST_IDS, unique.size()));
      chain = chain.thenCompose(nothing -> cancelSome(context, some, statuses, trace));
    }
    return chain.thenApply(nothing -> statuses);
  }

  private CompletableFuture<Void> cancelSome(
      Context context,
      List<String> ids,
      Map<String, CancelStatus> statuses,
      Map<String, String> trace) {
    if (!pool.many) {
      CancelRequest request = CancelRequest.newBuilder().addAllRequestIds(ids).build();
      Context.CancellableContext bounded = settings.bounded(context, Duration.ZERO, pool.timer);
      Attempts tries = new Attempts(pool, null, settings.retries, false);
      return UnaryCall.begin(
              pool, GenerationServiceGrpc.getCancelMethod(), request, "", tries, bounded)
          .whenComplete((answer, failed) -> bounded.cancel(null))
          .thenAccept(answer -> note(answer.message(), statuses));
    }
    return pool.settle(context)
        .thenCompose(
            nothing -> {
              Map<String, List<String>> byOwner = new HashMap<>();
              for (String id : ids) {
                String owner = pool.owner(id);
                owner = pool.byInstance(owner).isEmpty() ? "" : owner;
                byOwner.computeIfAbsent(owner, none -> new ArrayList<>()).add(id);
              }
              CompletableFuture<Void> chain = CompletableFuture.completedFuture(null);
              for (Map.Entry<String, List<String>> some : byOwner.entrySet()) {
                chain =
                    chain.thenCompose(
                        before ->
                            new OwnerCancel(
                                    context, some.getKey(), some.getValue(), statuses, trace)
                                .next());
              }
              return chain;
            });
  }

  private static void note(CancelResponse answer, Map<String, CancelStatus> statuses) {
    for (CancelResult one : answer.getResultsList()) {
      statuses.put(one.getRequestId(), CancelStatus.of(one.getStatus()));
    }
  }

  /**
   * Cancels at the instance that has the requests; if none is known, at each server what was not
   * found before.
   */
  private final class OwnerCancel {
    private final Context context;
    private final String owner;
    private final List<String> ids;
    private final Map<String, CancelStatus> statuses;
    private final Map<String, String> trace;
    private final List<Server> servers;
    private int at;
    private boolean answered;
    private HeadraceException problem = pool.nobody();

    OwnerCancel(
        Context context,
        String owner,
        List<String> ids,
        Map<String, CancelStatus> statuses,
        Map<String, String> trace) {
      this.context = context;
      this.owner = owner;
      this.ids = ids;
      this.statuses = statuses;
      this.trace = trace;
      servers =
          owner.isEmpty() ? pool.reachable() : pool.byInstance(owner).stream().limit(1).toList();
    }

    private boolean isFound(String id) {
      CancelStatus status = statuses.get(id);
      return status == CancelStatus.CANCELLED || status == CancelStatus.ALREADY_FINISHED;
    }

    CompletableFuture<Void> next() {
      List<String> left = ids.stream().filter(id -> !isFound(id)).toList();
      if (left.isEmpty() || at == servers.size()) {
        if (!answered && !left.isEmpty()) {
          return CompletableFuture.failedFuture(problem);
        }
        ids.forEach(
            id -> {
              if (statuses.getOrDefault(id, CancelStatus.UNKNOWN) == CancelStatus.UNKNOWN) {
                statuses.put(id, CancelStatus.NOT_FOUND);
              }
            });
        return CompletableFuture.completedFuture(null);
      }
      CancelRequest request =
          CancelRequest.newBuilder().addAllRequestIds(left).setInstanceId(owner).build();
      Context.CancellableContext bounded = settings.bounded(context, Duration.ZERO, pool.timer);
      return Calls.unary(
              servers.get(at++),
              GenerationServiceGrpc.getCancelMethod(),
              request,
              bounded,
              trace,
              "")
          .handle(
              (answer, failed) -> {
                bounded.cancel(null);
                return failed == null ? took(answer) : passedOver(Futures.errorOf(failed));
              })
          .thenCompose(
              failure -> failure == null ? next() : CompletableFuture.failedFuture(failure));
    }

    private HeadraceException took(CancelResponse answer) {
      answered = true;
      note(answer, statuses);
      return null;
    }

    /** The error, unless another server is to be asked in spite of it. */
    private HeadraceException passedOver(HeadraceException error) {
      if (error.code() == Status.Code.NOT_FOUND) { // another process is at that address now
        answered = true;
        return null;
      }
      if (error.code() == Status.Code.UNAVAILABLE) {
        problem = error;
        return null;
      }
      return error;
    }
  }
}
