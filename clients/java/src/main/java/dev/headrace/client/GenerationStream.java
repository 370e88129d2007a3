package dev.headrace.client;

import dev.headrace.v1.ResultEvent;
import java.util.ArrayDeque;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.Executor;

/**
 * One request's output on a stream of its own, from {@link HeadraceClient#stream} or {@link
 * HeadraceClient#attach}. It is sent at once; its output is asked for as it is read.
 *
 * <p>It must be read to its end, or closed; so use it in a try-with-resources statement. Closing it
 * before its end ends the request (one that was attached goes on).
 */
public final class GenerationStream extends Generation implements AutoCloseable {
  /**
   * Where the events come from. The stream's lock is not held when it calls, and may be in these.
   */
  interface Source {
    /** Begins; the first message is asked for. */
    void start(GenerationStream to);

    /** Asks for another message. */
    void ask();

    /** Lets go; inOrder: the request's end was told. */
    void finish(boolean inOrder);

    /** Asks for the request's end by its id. */
    void cancel(String requestId);
  }

  private final Source source;
  private final Fold fold;
  private final Queue<Chunk> queue = new ArrayDeque<>();
  private boolean asked = true; // whether a message is to come
  private boolean wantsAll; // whether messages are asked for as they come
  private boolean over; // nothing more comes

  GenerationStream(Executor callbacks, Fold fold, Source source) {
    super(callbacks);
    this.fold = fold;
    this.source = source;
    source.start(this);
  }

  /**
   * Asks the server to end the request: the stream then ends with {@link FinishReason#CANCELLED}
   * and the output so far. It waits for the server's answer.
   */
  @Override
  public void cancel() {
    source.cancel(requestId());
  }

  /**
   * Stops reading, and ends the request if it has not ended. (One that was attached goes on.) The
   * result is then the output until now, with {@link FinishReason#UNKNOWN} where the end had not
   * arrived. After the end it does nothing.
   */
  @Override
  public void close() {
    boolean wasTold;
    synchronized (lock) {
      if (over) {
        return;
      }
      over = true;
      queue.clear();
      wasTold = fold.wasTold();
    }
    source.finish(wasTold);
    end();
  }

  @Override
  Fold fold() {
    return fold;
  }

  @Override
  Chunk take() {
    synchronized (lock) {
      Chunk found = queue.poll();
      askIfEmpty();
      return found;
    }
  }

  @Override
  boolean hasChunk() {
    return !queue.isEmpty();
  }

  @Override
  boolean isOver() {
    return over;
  }

  @Override
  void readAll() {
    synchronized (lock) {
      wantsAll = true;
      askIfEmpty();
    }
  }

  @Override
  void leave() {
    close();
  }

  /** One message is on its way while the one before is read. The lock is held. */
  private void askIfEmpty() {
    if (!asked && !over && (wantsAll || queue.isEmpty())) {
      asked = true;
      source.ask();
    }
  }

  // ---- for its source
  // ----------------------------------------------------------------------------

  /** Takes a message. */
  void arrived(List<ResultEvent> events) {
    boolean isEnd;
    boolean wasTold;
    synchronized (lock) {
      if (over) {
        return;
      }
      asked = false;
      for (ResultEvent event : events) {
        Chunk chunk = fold.add(event);
        if (chunk != null) {
          queue.add(chunk);
        }
      }
      isEnd = fold.isDone();
      wasTold = fold.wasTold();
      over = isEnd;
      askIfEmpty();
      signal();
    }
    if (isEnd) {
      source.finish(wasTold);
      end();
    }
  }

  /** Takes the end of a source that has ended, in order if there is no error. */
  void ended(HeadraceException error) {
    synchronized (lock) {
      if (over) {
        return;
      }
      over = true;
      if (error != null && !fold.isDone()) {
        fold.fail(error);
      } else {
        fold.end();
      }
    }
    source.finish(false);
    end();
  }

  /** Whether the request may be sent again: nothing of it was delivered. */
  boolean mayRestart() {
    synchronized (lock) {
      return !over && !fold.hasBegun() && !fold.isDone();
    }
  }

  void restart() {
    synchronized (lock) {
      fold.restart();
    }
  }

  void setInstance(String instance) {
    synchronized (lock) {
      fold.setInstance(instance);
    }
  }
}
