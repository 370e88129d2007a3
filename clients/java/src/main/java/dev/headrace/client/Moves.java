package dev.headrace.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.HashSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;

/**
 * Where a session's requests go, and what becomes of them when their server refuses them or is
 * lost: docs/clients.md and docs/fleet.md have the rules. The session's lock is held in all of
 * these, but lost.
 */
final class Moves {
  private static final int MOST_LOSSES = 5; // how often a request is sent again
  private static final int MOST_BATCH_LOSSES = 11; // the same of a batch's, which has twelve tries
  private static final long FIRST_REATTACH = Pool.millis(100);
  private static final long LONGEST_REATTACH = Pool.seconds(1);

  private final Session session;

  Moves(Session session) {
    this.session = session;
  }

  private Pool pool() {
    return session.pool;
  }

  static HeadraceException cancelledWhileWaiting() {
    return HeadraceException.of(
        Status.Code.CANCELLED,
        "it was cancelled while it waited to be sent again",
        HeadraceException.Origin.CALLER);
  }

  private int mostTries() {
    return session.restarts ? MOST_BATCH_LOSSES : MOST_LOSSES;
  }

  /** Sends a request to a server, or has it wait for one. */
  void place(Handle handle, Set<Server> avoid) {
    long in;
    Server at;
    synchronized (pool()) {
      at = pool().choose(handle.keys, avoid, handle.lacking, false);
      in = at == null ? pool().roomIn(handle.lacking) : 0;
      if (at == null && in >= 0 && isTooLate(handle, in)) {
        at = pool().choose(handle.keys, avoid, handle.lacking, true);
      }
      if (at != null) {
        pool().begun(at);
      }
    }
    if (at != null) {
      sendTo(at, handle);
    } else if (in >= 0) {
      pause(handle, in);
    } else if (!handle.wantsServer) {
      handle.wantsServer = true;
      session.laterFor(
          handle,
          Math.max(Pool.PATIENCE, handle.leaseLeft()),
          () -> session.fail(handle, pool().nobody().forRequest(handle.id)));
    }
  }

  private static boolean isTooLate(Handle handle, long in) {
    return handle.isBounded && System.nanoTime() + in - handle.giveUpAt > 0;
  }

  /** Places a request after a while. */
  private void pause(Handle handle, long nanos) {
    handle.wantsServer = false;
    session.laterFor(handle, nanos, () -> place(handle, Set.of()));
  }

  private void sendTo(Server at, Handle handle) {
    Wire wire = Wire.to(session, at);
    handle.wire = wire;
    handle.attaching = false;
    handle.wantsServer = false;
    handle.instance = "";
    handle.turn++;
    wire.sendAdd(handle);
  }

  /** Continues a request that another stream began, where it lives. */
  void begin(Handle handle) {
    handle.askUntil = System.nanoTime() + Pool.PATIENCE;
    handle.instance = pool().owner(handle.id);
    List<Server> found = pool().many ? pool().byInstance(handle.instance) : List.of(pool().only());
    if (!found.isEmpty()) {
      attachAt(found.get(0), handle);
      return;
    }
    handle.instance = "";
    askNext(
        handle, HeadraceException.of(Status.Code.NOT_FOUND, "no server has request " + handle.id));
  }

  /** Continues a request at a server. */
  private void attachAt(Server at, Handle handle) {
    pool().begun(at);
    Wire wire = Wire.to(session, at);
    handle.wire = wire;
    handle.attaching = true;
    handle.turn++;
    wire.sendAttach(handle);
    if (handle.cancelled) {
      wire.sendCancel(handle.id, "");
    }
  }

  /** Ends a request whose end has arrived, unless its server failed before it gave anything. */
  void over(Wire wire, Handle handle, boolean wasTold) {
    HeadraceException error = handle.error();
    boolean begun = handle.hasBegun() && !session.restarts;
    if (error == null) {
      pool().succeeded();
    }
    pool().endedAlone(handle.id);
    if (session.resumes
        && wasTold
        && error.code() == Status.Code.UNAVAILABLE
        && handle.spec != null
        && !begun
        && !handle.cancelled
        && handle.losses < mostTries()) {
      wire.numbers.remove(handle.number, handle);
      session.leave(handle);
      handle.restart();
      sendAgain(handle, wire.server, error);
      return;
    }
    if (error != null && !wasTold && handle.spec != null) {
      wire.sendCancel(handle.id, ""); // the contract was broken: do not let it run for nobody
    }
    session.forget(handle);
    if (handle.losses > 0) {
      Optional.ofNullable(session.orphans.get(wire.instance))
          .ifPresent(ids -> ids.remove(handle.id));
      List.copyOf(session.wires.values()).forEach(this::endOrphans);
    }
    handle.close();
  }

  /** Cancels what runs at a server for nobody: its request has ended elsewhere. */
  void endOrphans(Wire wire) {
    String instance = wire.server.instance;
    Set<String> there = session.orphans.getOrDefault(instance, Set.of());
    for (String id : List.copyOf(there)) {
      if (!session.live.containsKey(id)) {
        there.remove(id);
        wire.sendCancel(id, instance);
      }
    }
  }

  /** Decides what becomes of a request that a server refused. */
  void refused(Wire wire, Handle handle, HeadraceException error) {
    Server at = wire.server;
    session.leave(handle);
    Optional<Duration> advice = error.retryAfter();
    Optional<Duration> roomTimeout = session.options.roomTimeout();
    if (handle.attaching) {
      notAttached(wire, handle, error);
    } else if (handle.cancelled && error.isWorthARetry()) {
      session.fail(handle, cancelledWhileWaiting());
    } else if (error.code() == Status.Code.ALREADY_EXISTS && handle.losses > 0) {
      attachAt(at, handle); // it had arrived after all
    } else if (error.code() == Status.Code.RESOURCE_EXHAUSTED
        && advice.isPresent()
        && !roomTimeout.map(Duration::isZero).orElse(false)) {
      findRoom(at, handle, error, Durations.nanos(advice.get()));
    } else if (error.code() == Status.Code.UNAVAILABLE
        && (pool().many || session.restarts)
        && handle.losses < mostTries()) {
      sendAgain(handle, at, error);
    } else if (error.lacksAdapter() && !handle.cancelled) {
      findAdapter(at, handle, error);
    } else {
      session.fail(handle, error);
    }
  }

  /** Sends a request at once to a server that has not said that it lacks the adapter. */
  private void findAdapter(Server at, Handle handle, HeadraceException error) {
    handle.lacking.add(at);
    if (pool().roomIn(handle.lacking) >= 0) {
      place(handle, Set.of());
    } else {
      session.fail(handle, error);
    }
  }

  /** Sends a request elsewhere, or again when its server may have room. */
  private void findRoom(Server at, Handle handle, HeadraceException error, long advice) {
    if (pool().many) {
      Server other = null;
      synchronized (pool()) {
        pool().noteFailure(at, error);
        if (pool().failedWithinBudget()) {
          other = pool().choose(handle.keys, Set.of(at), handle.lacking, false);
        }
      }
      if (other != null && other != at) {
        place(handle, Set.of(at));
        return;
      }
    }
    if (isTooLate(handle, advice)) {
      session.fail(handle, error);
    } else {
      pause(handle, advice);
    }
  }

  /** Takes a stream's end; null: the server ended it in order. The lock is not held. */
  void lost(Wire wire, HeadraceException told) {
    synchronized (session.lock) {
      session.wires.remove(wire.server, wire);
      wire.isOver = true;
      HeadraceException error = told;
      if (error == null) {
        error = HeadraceException.unavailable("the server ended the session before its requests");
      }
      if (session.cut) {
        error = session.ended; // this was no loss
      }
      boolean isLoss = error.isLoss() && wire.refused == null;
      if (isLoss && !session.closing) {
        pool().setAside(wire.server, error);
      }
      if (isLoss) {
        error = error.asLoss("the session");
      }
      if (session.ended == null
          && (!session.resumes || wire.refused != null)
          && (told != null || !session.closing)) {
        session.ended = error;
      }
      for (Handle handle : List.copyOf(session.live.values())) {
        if (handle.wire != wire) {
          continue;
        }
        if (handle.number != 0 || !handle.attaching && !wire.instance.isEmpty()) {
          handle.lostAnew(wire.lease); // it may be there, with a lease of its own
        } else if (!handle.wasLost) {
          handle.lostAnew(null);
        }
        wire.numbers.remove(handle.number, handle);
        session.leave(handle);
        if (isLoss && session.resumes) {
          move(wire, handle, error);
        } else {
          session.fail(handle, error.forRequest(handle.id));
        }
      }
      session.settle();
    }
  }

  /** Decides what becomes of a request whose stream was lost. */
  private void move(Wire wire, Handle handle, HeadraceException error) {
    boolean begun = handle.hasBegun() && !session.restarts;
    boolean mayWait = handle.spec != null && !begun && !handle.cancelled && !pool().many;
    if (mayWait && wire.instance.isEmpty() && handle.leaseLeft() > 0) {
      pause(handle, nextPause(handle)); // its server was not reached, and may have it: no try
    } else if (handle.spec == null || begun || handle.losses >= mostTries()) {
      reattach(wire, handle, error);
    } else if (handle.cancelled) {
      session.fail(handle, cancelledWhileWaiting());
    } else {
      if (!session.options.lease().isZero() && !wire.instance.isEmpty()) { // it may run on there
        session.orphans.computeIfAbsent(wire.instance, none -> new HashSet<>()).add(handle.id);
      }
      handle.restart();
      sendAgain(handle, wire.server, error);
    }
  }

  /** Sends a request once more: elsewhere at once, if the budget allows it, else after a pause. */
  private void sendAgain(Handle handle, Server avoid, HeadraceException error) {
    handle.losses++;
    boolean mayNow;
    synchronized (pool()) {
      pool().setAside(avoid, error);
      mayNow = pool().failedWithinBudget() && pool().many;
    }
    if (mayNow) {
      place(handle, Set.of(avoid));
    } else if (error.retryAfter().isPresent()) {
      pause(handle, Durations.nanos(error.retryAfter().get()));
    } else {
      long pause = pool().many ? Pool.seconds(1) : Attempts.pauseAfter(handle.losses - 1);
      pause(handle, (long) (pause * (0.5 + ThreadLocalRandom.current().nextDouble())));
    }
  }

  /** Attaches a request again where it lives, until its lease has passed. */
  private void reattach(Wire wire, Handle handle, HeadraceException error) {
    long pause = nextPause(handle);
    if (handle.instance.isEmpty() || handle.leaseLeft() < pause) {
      session.fail(handle, error.forRequest(handle.id));
      return;
    }
    session.laterFor(handle, pause, () -> attachAt(wire.server, handle));
  }

  /** How long to wait before the server that was lost is tried again: 0.1 s, 0.2 s, … 1 s. */
  private static long nextPause(Handle handle) {
    int times = handle.reattached++;
    return times < 4 ? Math.min(FIRST_REATTACH << times, LONGEST_REATTACH) : LONGEST_REATTACH;
  }

  /** Decides what becomes of a request that a server did not attach. */
  private void notAttached(Wire wire, Handle handle, HeadraceException error) {
    boolean isUnknown = error.code() == Status.Code.NOT_FOUND;
    if (pool().many && handle.spec == null && handle.instance.isEmpty() && isUnknown) {
      handle.asked.add(wire.server);
      askNext(handle, error);
      return;
    }
    if (error.reason().equals(HeadraceException.REASON_WRONG_INSTANCE)
        && handle.asked.add(wire.server)) {
      List<Server> found;
      synchronized (pool()) {
        pool().noteInstance(wire.server, error.metadata().getOrDefault("instance_id", ""));
        found = pool().byInstance(handle.instance);
      }
      if (!found.isEmpty() && handle.asked.size() == 1) { // followed once
        attachAt(found.get(0), handle);
        return;
      }
    }
    if (handle.spec != null && isUnknown) {
      if (!handle.hasBegun() && handle.losses < mostTries()) {
        handle.restart();
        sendAgain(handle, wire.server, error);
      } else {
        session.fail(
            handle,
            HeadraceException.unavailable(
                "the server that had the request was lost, and it with it"));
      }
      return;
    }
    session.fail(handle, error);
  }

  /** Attaches a request at the next server that may have it. */
  private void askNext(Handle handle, HeadraceException error) {
    Server next =
        pool().reachable().stream()
            .filter(one -> !handle.asked.contains(one))
            .findFirst()
            .orElse(null);
    if (next != null) {
      attachAt(next, handle);
    } else if (pool().isSettled() || System.nanoTime() - handle.askUntil > 0) {
      session.fail(handle, error.forRequest(handle.id));
    } else {
      session.laterFor(handle, FIRST_REATTACH, () -> askNext(handle, error));
    }
  }
}
