package dev.headrace.client;

import dev.headrace.v1.GenerationSpec;
import io.grpc.Context;
import io.grpc.Status;
import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Consumer;

/**
 * Many requests on one stream (one for each server, if there are several). It has no thread of its
 * own, and none for a request. A request that is not read delays no other.
 *
 * <p>A session must be ended, by {@link #finish} or {@link #close}; so use it in a
 * try-with-resources statement.
 */
public final class Session implements AutoCloseable {
  /** What a command has beside its request, with the names of the most capabilities. */
  private static final int COMMAND_BYTES = 4096;

  /** How long a close that cancels waits for the servers' answers. */
  private static final long CLOSE_PATIENCE = Pool.seconds(5);

  private final HeadraceClient client;
  final Pool pool;
  final SessionOptions options;
  final Map<String, String> trace; // of where the session was opened
  final Context context = Context.current().fork(); // its values; nothing ends it
  final boolean resumes; // whether a lost request goes on by itself
  final boolean restarts; // whether nothing counts as delivered before a request's end
  private final Moves moves = new Moves(this);

  // All that follows is guarded by this.
  final Object lock = new Object();
  final Map<String, Handle> live = new LinkedHashMap<>(); // the requests that have not ended
  final Map<Server, Wire> wires = new HashMap<>();
  final Map<String, Set<String>> orphans = new HashMap<>(); // by instance: what was sent elsewhere
  private final Set<Future<?>> timers = new HashSet<>();
  boolean closing; // whether it takes no more requests
  boolean cut; // whether all streams were cut
  HeadraceException ended; // why it takes none, if it was lost or closed
  private final CompletableFuture<Void> quiet = new CompletableFuture<>(); // nothing is left of it

  Session(HeadraceClient client, SessionOptions options, boolean restarts) {
    this.client = client;
    this.pool = client.pool();
    this.options = options;
    this.restarts = restarts;
    this.resumes = !options.lease().isZero() || pool.many;
    this.trace = TraceContext.current();
    pool.listen(this);
  }

  // ---- for users -------------------------------------------------------------------------------

  /**
   * Starts a request, and returns without waiting for the server. What the server refuses is told
   * by the handle.
   *
   * @param request what to generate
   * @return its handle
   * @throws HeadraceException if the request cannot be sent, or the session was closed, or lost
   *     without a lease
   */
  public Handle submit(Request request) {
    return submit(request, null);
  }

  Handle submit(Request request, Consumer<Handle> onEnd) {
    GenerationSpec spec = TraceContext.label(request.toSend());
    int most = client.maxMessageBytes();
    if (spec.getSerializedSize() + COMMAND_BYTES > most) { // it would end the stream for all
      throw HeadraceException.of(
              Status.Code.RESOURCE_EXHAUSTED,
              "the request takes "
                  + spec.getSerializedSize()
                  + " bytes, and messages may have "
                  + most
                  + "; see maxMessageBytes",
              HeadraceException.Origin.CALLER)
          .forRequest(spec.getRequestId());
    }
    Fold fold = new Fold(spec.getRequestId(), Request.choicesOf(spec), 1);
    Handle handle = new Handle(this, fold, onEnd);
    handle.spec = spec;
    handle.keys = PrefixKeys.of(spec);
    options
        .roomTimeout()
        .filter(timeout -> !timeout.isZero())
        .ifPresent(
            timeout -> {
              handle.isBounded = true;
              handle.giveUpAt = System.nanoTime() + Durations.nanos(timeout);
            });
    synchronized (lock) {
      register(handle);
      moves.place(handle, Set.of());
    }
    return handle;
  }

  /**
   * Continues a request of another session, or of {@link HeadraceClient#add}, on this one, from its
   * beginning.
   *
   * @param id the request's id
   * @return its handle
   * @throws HeadraceException if the session was closed, or has the request
   */
  public Handle attach(String id) {
    return attach(new Fold(Texts.sendable("request_id", id), 0, 1));
  }

  /**
   * Continues a request of another session, or of {@link HeadraceClient#add}, on this one. The
   * handle has only what follows.
   *
   * @param id the request's id
   * @param from the number of the first event wanted
   * @param choices how many outputs the request has, which event 1 tells
   * @return its handle
   * @throws HeadraceException if the session was closed, or has the request
   */
  public Handle attach(String id, long from, int choices) {
    if (choices < 0 || from > 1 && choices == 0) {
      throw HeadraceException.invalid(
          "choices", "a request has at least one; only event 1 tells them");
    }
    return attach(new Fold(Texts.sendable("request_id", id), choices, from));
  }

  private Handle attach(Fold fold) {
    Handle handle = new Handle(this, fold, null);
    synchronized (lock) {
      register(handle);
      moves.begin(handle);
    }
    return handle;
  }

  /**
   * Continues a request whose session was lost, on this one, where its handle left off. If the end
   * had arrived, nothing is sent.
   *
   * @param lost the handle of the lost session
   * @return a handle that has all output from the beginning
   * @throws HeadraceException if the session was closed, or has the request
   */
  public Handle resume(Handle lost) {
    Handle handle = Handle.resuming(this, lost);
    synchronized (lock) {
      if (handle.isDone()) {
        handle.close();
      } else {
        register(handle);
        moves.begin(handle);
      }
    }
    return handle;
  }

  /** Takes a request in. The lock is held. */
  private void register(Handle handle) {
    if (ended != null) {
      throw ended.forRequest(handle.id).thrownHere();
    }
    if (closing) {
      throw HeadraceException.closed("the session").forRequest(handle.id);
    }
    if (live.containsKey(handle.id)) {
      throw HeadraceException.of(
              Status.Code.ALREADY_EXISTS,
              "a request " + handle.id + " is live on this session",
              HeadraceException.Origin.CALLER)
          .forRequest(handle.id);
    }
    live.put(handle.id, handle);
  }

  /**
   * How many requests have not ended.
   *
   * @return at least 0
   */
  public int live() {
    synchronized (lock) {
      return live.size();
    }
  }

  /**
   * The lease that the server granted; of several servers, the shortest.
   *
   * @return empty: none has answered yet, or the session asked for none
   */
  public Optional<Duration> lease() {
    synchronized (lock) {
      return wires.values().stream()
          .filter(wire -> wire.lease != null)
          .map(wire -> wire.lease)
          .min(Duration::compareTo);
    }
  }

  /**
   * Takes no more requests and waits until the live ones have ended; they need no reader for that.
   * Then the session has ended.
   *
   * @throws HeadraceException if the thread is interrupted; the live requests go on then
   */
  public void finish() {
    beginFinish();
    Futures.await(quiet.copy());
  }

  /**
   * Takes no more requests, and ends the session when the live ones have ended.
   *
   * @return completes then; its cancel ends the wait alone
   */
  public CompletableFuture<Void> finishAsync() {
    beginFinish();
    return quiet.thenRunAsync(() -> {}, callbacks());
  }

  private void beginFinish() {
    synchronized (lock) {
      closing = true;
      live.values().forEach(this::payAllLocked);
      settle();
    }
  }

  /**
   * Cancels the live requests, waits for their ends, at most a few seconds, and ends the session.
   * After {@link #finish} it does nothing.
   */
  @Override
  public void close() {
    synchronized (lock) {
      closing = true;
      List.copyOf(live.values()).forEach(this::cancelLocked);
      settle();
    }
    if (!isQuietWithin(CLOSE_PATIENCE)) {
      abort(HeadraceException.closed("the session"));
    }
  }

  private boolean isQuietWithin(long nanos) {
    try {
      quiet.get(nanos, TimeUnit.NANOSECONDS);
      return true;
    } catch (InterruptedException asked) {
      Thread.currentThread().interrupt();
      return false;
    } catch (ExecutionException | TimeoutException late) {
      return false;
    }
  }

  /** Cuts all streams, and fails what is left. */
  void abort(HeadraceException why) {
    synchronized (lock) {
      if (quiet.isDone()) {
        return;
      }
      closing = true;
      cut = true;
      ended = why;
      List.copyOf(live.values()).forEach(handle -> fail(handle, why.forRequest(handle.id)));
      stopTimers();
      wires.values().forEach(wire -> wire.cut("the session was closed"));
      settle();
    }
    isQuietWithin(CLOSE_PATIENCE);
  }

  // ---- for its handles -------------------------------------------------------------------------

  Executor callbacks() {
    return client.callbacks();
  }

  boolean hasCredits() {
    return options.initialCredit() > 0;
  }

  void cancel(Handle handle) {
    synchronized (lock) {
      cancelLocked(handle);
    }
  }

  /** Lets the server send more for what the reader has taken. */
  void pay(Handle handle, Wire wire, int tokens) {
    synchronized (lock) {
      payLocked(handle, wire, tokens);
    }
  }

  /** Pays for all that has arrived and will arrive. */
  void payAll(Handle handle) {
    if (hasCredits()) {
      synchronized (lock) {
        payAllLocked(handle);
      }
    }
  }

  // ---- for its parts; the lock is held in all of these but serverChanged
  // ---------------------------

  /** Has requests that wait for a server look again. */
  void serverChanged() {
    synchronized (lock) {
      for (Handle handle : List.copyOf(live.values())) {
        if (handle.wantsServer) {
          moves.place(handle, Set.of());
        }
      }
    }
  }

  Moves moves() {
    return moves;
  }

  /** Asks for a request's end; it ends with what it has. */
  private void cancelLocked(Handle handle) {
    if (live.get(handle.id) != handle) {
      return;
    }
    handle.cancelled = true;
    if (handle.wire == null) {
      fail(handle, Moves.cancelledWhileWaiting());
      return;
    }
    handle.wire.sendCancel(handle.id, "");
    payAllLocked(handle); // its end, too, comes behind its last token
  }

  void payLocked(Handle handle, Wire wire, int tokens) {
    if (hasCredits() && tokens > 0 && wire != null && handle.wire == wire) {
      wire.sendCredit(handle.id, tokens);
    }
  }

  private void payAllLocked(Handle handle) {
    if (hasCredits() && !handle.unlimited) {
      handle.unlimited = true;
      payLocked(handle, handle.wire, handle.takeOwed());
    }
  }

  /** Ends a request with an error that is not the server's end of it. */
  void fail(Handle handle, HeadraceException error) {
    handle.fail(error);
    forget(handle);
    handle.close();
  }

  /** Drops an ended request. */
  void forget(Handle handle) {
    live.remove(handle.id, handle);
    if (handle.wire != null) {
      handle.wire.numbers.remove(handle.number, handle);
      leave(handle);
    }
    settle();
  }

  /** Takes a request from its stream. */
  void leave(Handle handle) {
    Wire wire = handle.wire;
    wire.commands.remove(handle.command, handle);
    handle.wire = null;
    handle.number = 0;
    pool.over(wire.server);
  }

  /**
   * Half-closes the streams once the session is being closed and no request is live, and notes when
   * none is left. While a request is live, its credits or a cancel may still have to be sent.
   */
  void settle() {
    if (!closing || !live.isEmpty()) {
      return;
    }
    wires.values().forEach(Wire::halfClose);
    if (wires.isEmpty() && !quiet.isDone()) {
      stopTimers();
      client.forget(this);
      pool.ignore(this);
      quiet.complete(null); // who waits for it runs elsewhere
    }
  }

  private void stopTimers() {
    timers.forEach(timer -> timer.cancel(false));
    timers.clear();
  }

  /** Does something for a request after a while, if nothing else has come of it by then. */
  void laterFor(Handle handle, long nanos, Runnable act) {
    int turn = ++handle.turn;
    var kept =
        new Object() {
          Future<?> timer;
        };
    kept.timer =
        pool.timer.schedule(
            () -> {
              synchronized (lock) {
                timers.remove(kept.timer);
                if (handle.turn == turn && live.get(handle.id) == handle) {
                  act.run();
                  settle();
                }
              }
            },
            Math.max(nanos, 0),
            TimeUnit.NANOSECONDS);
    timers.add(kept.timer);
  }
}
