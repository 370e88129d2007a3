package dev.headrace.client;

import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/** The tries of a call that any server may answer. They come one after the other. */
final class Attempts {
  private static final long FIRST_PAUSE = Pool.millis(100);
  private static final long LONGEST_PAUSE = Pool.seconds(2);

  private final Pool pool;
  private final PrefixKeys keys;
  private final boolean sticks; // the server of a lost connection is asked again: it may have it
  private final Set<Server> tried = new HashSet<>();
  private final Set<Server> lacking = new HashSet<>(); // which said that they lack the adapter
  private final long began = System.nanoTime();
  private int left;
  private Server same;
  private int pauses;
  private boolean full; // it has waited for room once; now it may ask

  Attempts(Pool pool, PrefixKeys keys, int retries, boolean sticks) {
    this.pool = pool;
    this.keys = keys;
    this.left = retries;
    this.sticks = sticks;
  }

  /** How long to wait after a failure without advice: 0.1 s, three times as long each time, 2 s. */
  static long pauseAfter(int times) {
    long pause = FIRST_PAUSE;
    for (int i = 0; i < times && pause < LONGEST_PAUSE; i++) {
      pause = Math.min(3 * pause, LONGEST_PAUSE);
    }
    return pause;
  }

  /** The server to call now, once there is one. The call counts as begun there. */
  CompletableFuture<Server> next(Context context) {
    Pause waits;
    synchronized (pool) {
      if (pool.isClosed()) {
        return CompletableFuture.failedFuture(HeadraceException.closed("the client"));
      }
      Server one = same != null ? same : pool.choose(keys, tried, lacking, full);
      if (one != null) {
        pool.begun(one);
        return CompletableFuture.completedFuture(one);
      }
      long pause = pool.roomIn(lacking);
      if (pause >= 0) {
        full = true;
      } else {
        pause = Pool.PATIENCE - (System.nanoTime() - began);
        if (pause <= 0) {
          return CompletableFuture.failedFuture(pool.nobody());
        }
      }
      waits = pool.change(context, pause);
    }
    return waits.thenCompose(nothing -> next(context));
  }

  /** Notes a failed try, and waits as long as the next one must. It fails if there is none. */
  CompletableFuture<Void> failed(Context context, Server at, HeadraceException error) {
    long pause;
    synchronized (pool) {
      pause = pause(at, error);
    }
    if (pause < 0) {
      return CompletableFuture.failedFuture(error);
    }
    Deadline deadline = context.getDeadline();
    if (deadline != null && deadline.timeRemaining(TimeUnit.NANOSECONDS) < pause) {
      return CompletableFuture.failedFuture(error); // it would not be tried again
    }
    return pause == 0 ? CompletableFuture.completedFuture(null) : pool.pause(context, pause);
  }

  /** How long to wait; negative: it is not tried again. The pool's lock is held. */
  private long pause(Server at, HeadraceException error) {
    if (error.lacksAdapter()) { // each server is asked once: that is no retry
      same = null;
      lacking.add(at);
      return pool.roomIn(lacking) < 0 ? -1 : 0;
    }
    if (!error.isWorthARetry() || left == 0 || pool.isClosed()) {
      if (error.code() == Status.Code.UNAVAILABLE) {
        pool.setAside(at, error);
      }
      return -1;
    }
    left--;
    ThreadLocalRandom random = ThreadLocalRandom.current();
    if (!pool.many) {
      return spread(error, random.nextDouble());
    }
    boolean mayNow = pool.failedWithinBudget();
    if (sticks && same == null && error.reason().isEmpty()) {
      same = at;
      return mayNow ? 0 : spread(error, 0.5 + random.nextDouble());
    }
    same = null;
    pool.noteFailure(at, error);
    tried.add(at);
    Server other = pool.choose(keys, tried, lacking, false);
    if (mayNow && other != null && !tried.contains(other)) {
      return 0;
    }
    tried.clear();
    full = true;
    return spread(error, 0.5 + random.nextDouble());
  }

  private long spread(HeadraceException error, double by) {
    return error
        .retryAfter()
        .map(Durations::nanos)
        .orElseGet(() -> (long) (pauseAfter(pauses++) * by));
  }
}
