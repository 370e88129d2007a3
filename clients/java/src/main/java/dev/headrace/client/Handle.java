package dev.headrace.client;

import dev.headrace.v1.GenerationSpec;
import dev.headrace.v1.ResultEvent;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.function.Consumer;

/**
 * One request of a session. One that is not read delays no other. If it is read late, its output is
 * kept until then; with credits the server sends no more than these allow.
 */
public final class Handle extends Generation {
  final Session session;
  final String id;
  private final Consumer<Handle> onEnd; // called at the end, with the session's lock held; or null

  // The session's lock guards these.
  GenerationSpec spec; // what to send; null: another stream started it
  PrefixKeys keys;
  Wire wire; // where it is; null: it waits, or has ended
  int number; // by which its events there name it; 0: not known yet
  long command; // the number of the command that brought it there
  boolean attaching; // whether it was attached there, not added
  boolean unlimited; // whether everything that arrives is paid for at once
  boolean cancelled;
  boolean wantsServer; // whether it waits for a server to be ready
  boolean isBounded; // whether it is sent again for want of room until a time only
  long giveUpAt;
  String instance = ""; // the process that has it
  int losses; // how often it was sent again
  int reattached;
  boolean wasLost; // whether its stream was
  private long lostUntil; // until when the server that it was lost with may have it
  final Set<Server> asked = new HashSet<>();
  final Set<Server> lacking = new HashSet<>(); // which said that they lack its adapter
  long askUntil;
  int turn; // grows when it is sent or begins to wait: what was to be done before is void

  // The handle's lock guards these.
  private final Fold fold;
  private final List<Chunk> chunks = new ArrayList<>(); // all: who resumes it elsewhere wants all
  private final List<Wire> payers; // of each chunk: the stream to pay when it is read; null: paid
  private int read; // how many of them the reader has taken
  private final boolean discards; // whether nobody will read it
  private boolean closed;

  Handle(Session session, Fold fold, Consumer<Handle> onEnd) {
    super(session.callbacks());
    this.session = session;
    this.id = fold.id();
    this.fold = fold;
    this.onEnd = onEnd;
    this.discards = onEnd != null;
    this.payers = session.hasCredits() ? new ArrayList<>() : null; // without credits none is paid
  }

  /** A handle that goes on where a lost one was interrupted, with all of its output. */
  static Handle resuming(Session session, Handle lost) {
    synchronized (lost.lock) {
      Handle made = new Handle(session, lost.fold.reopened(), null);
      lost.chunks.forEach(one -> made.add(one, null));
      return made;
    }
  }

  /** Its stream was lost; the server may have it for this lease. Null: that granted none. */
  void lostAnew(Duration lease) {
    long until = System.nanoTime() + (lease == null ? 0 : Durations.nanos(lease));
    lostUntil = wasLost && lostUntil - until > 0 ? lostUntil : until;
    wasLost = true;
    reattached = 0;
  }

  /** For how many nanoseconds the server that it was lost with may still have it. */
  long leaseLeft() {
    return wasLost ? lostUntil - System.nanoTime() : 0;
  }

  /**
   * Asks for the request's end. It does not wait for it: the handle then ends with {@link
   * FinishReason#CANCELLED} and the output so far. It does nothing if the request has ended.
   */
  @Override
  public void cancel() {
    session.cancel(this);
  }

  @Override
  Fold fold() {
    return fold;
  }

  @Override
  Chunk take() {
    Chunk next;
    Wire payer;
    synchronized (lock) {
      if (read == chunks.size()) {
        return null;
      }
      next = chunks.get(read);
      payer = payers == null ? null : payers.get(read);
      read++;
    }
    if (payer != null) {
      session.pay(this, payer, next.tokenIds().size());
    }
    return next;
  }

  @Override
  boolean hasChunk() {
    return read < chunks.size();
  }

  @Override
  boolean isOver() {
    return closed;
  }

  @Override
  void readAll() {
    session.payAll(this);
  }

  @Override
  void leave() {
    // The request goes on: who wants its end cancels it.
  }

  // ---- for its session, whose lock is held -----------------------------------------------------

  /** Counts the tokens that its stream has sent and nobody has paid for; they count as paid now. */
  int takeOwed() {
    int tokens = 0;
    synchronized (lock) {
      for (int i = read; payers != null && i < chunks.size(); i++) {
        if (payers.get(i) != null && payers.get(i) == wire) {
          tokens += chunks.get(i).tokenIds().size();
          payers.set(i, null);
        }
      }
    }
    return tokens;
  }

  /** Adds an event. It returns how many tokens are to be paid for at once. */
  int take(Wire from, ResultEvent event) {
    synchronized (lock) {
      fold.setInstance(from.instance);
      Chunk chunk = fold.add(event);
      if (chunk == null) {
        return 0;
      }
      if (!discards) {
        add(chunk, unlimited ? null : from);
        signal();
      }
      return session.hasCredits() && unlimited ? chunk.tokenIds().size() : 0;
    }
  }

  /** Keeps a chunk for the reader. The lock is held. */
  private void add(Chunk chunk, Wire payer) {
    chunks.add(chunk);
    if (payers != null) {
      payers.add(payer);
    }
  }

  boolean isDone() {
    synchronized (lock) {
      return fold.isDone();
    }
  }

  boolean hasBegun() {
    synchronized (lock) {
      return fold.hasBegun();
    }
  }

  HeadraceException error() {
    synchronized (lock) {
      return fold.error();
    }
  }

  void fail(HeadraceException error) {
    synchronized (lock) {
      fold.fail(error);
    }
  }

  /** Forgets all output: the request is sent again. */
  void restart() {
    synchronized (lock) {
      fold.restart();
      chunks.clear();
      if (payers != null) {
        payers.clear();
      }
      read = 0;
    }
  }

  /** Tells the readers of the end. */
  void close() {
    synchronized (lock) {
      if (closed) {
        return;
      }
      closed = true;
    }
    end();
    if (onEnd != null) {
      onEnd.accept(this);
    }
  }

  /** What came of it, once it is closed. */
  Outcome outcome(int index) {
    synchronized (lock) {
      return fold.error() != null
          ? new Outcome(index, Optional.empty(), Optional.of(fold.error()))
          : new Outcome(index, Optional.of(fold.partial()), Optional.empty());
    }
  }
}
