package dev.headrace.client;

import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.Queue;
import java.util.Spliterator;
import java.util.Spliterators;
import java.util.concurrent.Semaphore;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * The outcomes of a batch, one for each request, read once and by one thread. It must be read to
 * its end, or closed; so use it in a try-with-resources statement. What runs when it is closed is
 * cancelled, and no more requests are taken.
 */
public final class Batch implements Iterable<Outcome>, Iterator<Outcome>, AutoCloseable {
  /** How many windows of outcomes may wait for who takes them, or for an earlier one. */
  private static final int WINDOWS_AHEAD = 16;

  private final Session session;
  private final BatchOptions options;
  private final Semaphore slots; // one for each request that may go to the server
  private final Semaphore ahead; // one for each outcome that may wait
  private final Thread feeder;

  // Guarded by this.
  private final Queue<Outcome> ended = new ArrayDeque<>(); // those that may be taken
  private final Map<Integer, Outcome> waiting = new HashMap<>(); // for an earlier one
  private int next; // whose turn it is, if they are ordered
  private int given;
  private int total = -1; // how many requests there were; -1: not known yet
  private RuntimeException broken; // what the user's iterator threw
  private boolean closed;

  Batch(Session session, Iterator<Request> requests, BatchOptions options) {
    this.session = session;
    this.options = options;
    slots = new Semaphore(options.maxInFlight());
    ahead = new Semaphore(Math.multiplyExact(WINDOWS_AHEAD, options.maxInFlight()));
    feeder = new Thread(() -> feed(requests), "headrace-batch");
    feeder.setDaemon(true);
    feeder.start();
  }

  /** Submits requests as there is room for them, on a thread of its own. */
  private void feed(Iterator<Request> requests) {
    int index = 0;
    RuntimeException thrown = null;
    try {
      for (; ; ) {
        ahead.acquire();
        slots.acquire();
        if (isClosed() || !requests.hasNext()) {
          break;
        }
        begin(index++, requests.next());
      }
    } catch (InterruptedException closing) {
      return;
    } catch (RuntimeException theirs) {
      thrown = theirs;
    }
    synchronized (this) {
      total = index;
      broken = thrown;
      notifyAll();
    }
  }

  private void begin(int index, Request request) {
    try {
      session.submit(request, handle -> end(handle.outcome(index)));
    } catch (HeadraceException refused) {
      end(new Outcome(index, Optional.empty(), Optional.of(refused)));
    }
  }

  private void end(Outcome outcome) {
    slots.release();
    synchronized (this) {
      if (!options.ordered()) {
        ended.add(outcome);
      } else {
        waiting.put(outcome.index(), outcome);
        for (Outcome due = waiting.remove(next); due != null; due = waiting.remove(next)) {
          ended.add(due);
          next++;
        }
      }
      notifyAll();
    }
  }

  private synchronized boolean isClosed() {
    return closed;
  }

  /**
   * Waits for the next outcome.
   *
   * @return false: all were given, or the batch was closed
   * @throws HeadraceException if the thread is interrupted
   */
  @Override
  public boolean hasNext() {
    synchronized (this) {
      while (!closed && ended.isEmpty() && given != total) {
        try {
          wait();
        } catch (InterruptedException asked) {
          throw Futures.interrupted("");
        }
      }
      if (!closed && !ended.isEmpty()) {
        return true;
      }
    }
    close();
    synchronized (this) {
      if (broken != null) {
        RuntimeException theirs = broken;
        broken = null;
        throw theirs;
      }
    }
    return false;
  }

  @Override
  public Outcome next() {
    if (!hasNext()) {
      throw new NoSuchElementException("all outcomes were given");
    }
    synchronized (this) {
      given++;
      ahead.release();
      return ended.remove();
    }
  }

  /**
   * These outcomes.
   *
   * @return this, which can be read once
   */
  @Override
  public Iterator<Outcome> iterator() {
    return this;
  }

  /**
   * These outcomes as a stream, whose close is this batch's.
   *
   * @return a sequential stream
   */
  public Stream<Outcome> stream() {
    int kind = Spliterator.NONNULL | (options.ordered() ? Spliterator.ORDERED : 0);
    return StreamSupport.stream(Spliterators.spliteratorUnknownSize(this, kind), false)
        .onClose(this::close);
  }

  /** Cancels what runs, and takes no more requests. */
  @Override
  public void close() {
    synchronized (this) {
      if (closed) {
        return;
      }
      closed = true;
      notifyAll();
    }
    feeder.interrupt();
    session.close();
  }
}
