package dev.headrace.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;

/**
 * A request that runs: its output as it comes, and its result.
 *
 * <p>The output is read by one reader at a time: a loop over it, or a subscriber. Each chunk comes
 * once: another loop goes on where the last one ended. The result needs no reader.
 */
public abstract sealed class Generation implements Iterable<Chunk>
    permits Handle, GenerationStream {
  final Object lock = new Object();
  private final Executor callbacks;
  private final CompletableFuture<Void> ended = new CompletableFuture<>();
  private final Iterator<Chunk> reader = new Reader();
  private volatile Chunk ahead; // the reader has looked at it; there is one reader at a time
  private ChunkSubscription subscription;

  Generation(Executor callbacks) {
    this.callbacks = callbacks;
  }

  // ---- what the kinds of it have ---------------------------------------------------------------

  /** What its events say. The lock is held. */
  abstract Fold fold();

  /** Takes the next chunk; null: there is none now. */
  abstract Chunk take();

  /** Whether there is a chunk. The lock is held. */
  abstract boolean hasChunk();

  /** Whether no more comes. The lock is held. */
  abstract boolean isOver();

  /** Has everything come, without a reader: somebody waits for the result. */
  abstract void readAll();

  /** A reader has left before the end. */
  abstract void leave();

  /** Asks for the request's end. It ends with what it has, and the reason CANCELLED. */
  public abstract void cancel();

  // ---- for users -------------------------------------------------------------------------------

  /**
   * The request's id.
   *
   * @return the one that was given, or made
   */
  public String requestId() {
    synchronized (lock) {
      return fold().id();
    }
  }

  /**
   * The parameters in force.
   *
   * @return empty, before the server has accepted the request
   */
  public Optional<Accepted> accepted() {
    synchronized (lock) {
      return fold().accepted();
    }
  }

  /**
   * The number of the event that comes next: from where the request could be attached.
   *
   * @return at least 1
   */
  public long nextSeq() {
    synchronized (lock) {
      return fold().next();
    }
  }

  /**
   * The output as it comes. The loop waits for it, ends with the request, and throws {@link
   * HeadraceException} if that failed, with the output in {@link HeadraceException#partial}.
   *
   * @return the same iterator each time, which goes on where it was left
   */
  @Override
  public Iterator<Chunk> iterator() {
    return reader;
  }

  /**
   * The output as it comes, at the subscriber's demand. It has one subscriber, which is called by
   * the client's executor and must not wait there. Its cancel ends the reading: of a stream it is a
   * close, a session's request goes on.
   *
   * @return the publisher
   */
  public Flow.Publisher<Chunk> publisher() {
    return subscriber -> {
      ChunkSubscription made = new ChunkSubscription(this, subscriber, callbacks);
      synchronized (lock) {
        made.isSecond = subscription != null;
        if (!made.isSecond) {
          subscription = made;
        }
      }
      made.begin();
    };
  }

  /**
   * Waits for the end and returns the whole result. A cancelled request has one too.
   *
   * @return the result
   * @throws HeadraceException if the request failed
   */
  public Result result() {
    return resultWithin(Long.MAX_VALUE);
  }

  /**
   * Waits for the end, but not longer, and returns the whole result.
   *
   * @param atMost then the wait ends with the code DEADLINE_EXCEEDED, and the request goes on
   * @return the result
   * @throws HeadraceException if the request failed
   */
  public Result result(Duration atMost) {
    return resultWithin(Durations.nanos(atMost));
  }

  private Result resultWithin(long nanos) {
    readAll();
    long end = System.nanoTime() + nanos;
    synchronized (lock) {
      try {
        while (!isOver()) {
          long left = nanos == Long.MAX_VALUE ? nanos : end - System.nanoTime();
          if (left <= 0) {
            throw HeadraceException.of(
                    Status.Code.DEADLINE_EXCEEDED,
                    "the request has not ended yet",
                    HeadraceException.Origin.CALLER)
                .forRequest(fold().id());
          }
          TimeUnit.NANOSECONDS.timedWait(lock, Math.max(left, 1_000_000));
        }
      } catch (InterruptedException asked) {
        throw Futures.interrupted(fold().id());
      }
      return outcome();
    }
  }

  /**
   * The whole result, when the request has ended.
   *
   * @return it fails with {@link HeadraceException}; its cancel ends the wait alone
   */
  public CompletableFuture<Result> resultAsync() {
    readAll();
    CompletableFuture<Result> made = new CompletableFuture<>();
    ended.thenRun(
        () -> {
          try {
            made.complete(outcome());
          } catch (HeadraceException failed) {
            made.completeExceptionally(failed);
          }
        });
    return made;
  }

  private Result outcome() {
    synchronized (lock) {
      if (fold().error() != null) {
        throw fold().error().thrownHere();
      }
      return fold().partial();
    }
  }

  // ---- for the kinds of it ---------------------------------------------------------------------

  /** Tells readers of chunks or of the end. The lock is held. */
  void signal() {
    lock.notifyAll();
    if (subscription != null) {
      subscription.schedule();
    }
  }

  /** Tells of the end. */
  void end() {
    synchronized (lock) {
      signal();
    }
    callbacks.execute(() -> ended.complete(null));
  }

  /** The next chunk, of what the reader has looked at too; null: there is none now. */
  Chunk poll() {
    Chunk found = ahead;
    if (found == null) {
      return take();
    }
    ahead = null;
    return found;
  }

  /** The end of the output, once all was read: null, if there is more; empty: it is whole. */
  Optional<HeadraceException> theEnd() {
    synchronized (lock) {
      return ahead != null || hasChunk() || !isOver() ? null : Optional.ofNullable(fold().error());
    }
  }

  private final class Reader implements Iterator<Chunk> {
    @Override
    public boolean hasNext() {
      for (; ; ) {
        Chunk found = poll();
        if (found != null) {
          ahead = found;
          return true;
        }
        synchronized (lock) {
          if (isOver() && !hasChunk()) {
            if (fold().error() != null) {
              throw fold().error().thrownHere();
            }
            return false;
          }
          try {
            if (!hasChunk()) {
              lock.wait();
            }
          } catch (InterruptedException asked) {
            throw Futures.interrupted(fold().id());
          }
        }
      }
    }

    @Override
    public Chunk next() {
      if (ahead == null && !hasNext()) {
        throw new NoSuchElementException("the request has ended");
      }
      return poll();
    }
  }
}
