package dev.headrace.client;

import java.util.Optional;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;

/** Gives a request's output to a subscriber, at its demand, one call at a time. */
final class ChunkSubscription implements Flow.Subscription {
  private final Generation from;
  private final Flow.Subscriber<? super Chunk> to;
  private final Executor executor;
  private final AtomicLong demand = new AtomicLong();
  private final AtomicInteger due =
      new AtomicInteger(); // above 0: a run is going on, or is to come
  private final AtomicBoolean over = new AtomicBoolean();
  private volatile RuntimeException refused;
  private volatile boolean begun;
  boolean isSecond;

  ChunkSubscription(Generation from, Flow.Subscriber<? super Chunk> to, Executor executor) {
    this.from = from;
    this.to = to;
    this.executor = executor;
  }

  void begin() {
    to.onSubscribe(this);
    begun = true;
    if (isSecond) {
      refused = new IllegalStateException("the output has a subscriber already");
    }
    schedule();
  }

  @Override
  public void request(long count) {
    if (count <= 0) {
      refused = new IllegalArgumentException("the demand is at least 1, not " + count);
    } else {
      demand.accumulateAndGet(count, (a, b) -> a + b < 0 ? Long.MAX_VALUE : a + b);
    }
    schedule();
  }

  @Override
  public void cancel() {
    if (!over.getAndSet(true) && !isSecond) {
      from.leave();
    }
  }

  /** Has the subscriber told what there is. */
  void schedule() {
    if (begun && due.getAndIncrement() == 0) {
      executor.execute(this::run);
    }
  }

  private void run() {
    int seen = due.get();
    do {
      give();
      seen = due.addAndGet(-seen);
    } while (seen > 0);
  }

  private void give() {
    while (!over.get()) {
      if (refused != null) {
        over.set(true);
        to.onError(refused);
        return;
      }
      Chunk found = demand.get() > 0 ? from.poll() : null;
      if (found != null) {
        demand.decrementAndGet();
        to.onNext(found);
        continue;
      }
      Optional<HeadraceException> end = from.theEnd();
      if (end == null) {
        return; // schedule() is called when there is more, or the end
      }
      over.set(true);
      end.ifPresentOrElse(to::onError, to::onComplete);
    }
  }
}
