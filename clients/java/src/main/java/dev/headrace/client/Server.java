package dev.headrace.client;

import dev.headrace.v1.ServerLoad;
import io.grpc.ManagedChannel;

/** One server, as the client knows it. The pool's lock guards what changes. */
final class Server {
  enum State {
    /** Not known to be ready: asked until it is. */
    JOINING,
    READY,
    /** Listed no longer: what runs there goes on. */
    LEAVING
  }

  private static final long LOAD_HOLDS = Pool.seconds(5);
  private static final long FIRST_CHECK = Pool.millis(100);

  final Target.Address address;
  final ManagedChannel channel;

  State state = State.JOINING;
  String instance = ""; // its process; empty: not known
  int capacity = 1; // how many requests it runs at a time
  int outstanding; // how many requests of this client it has
  long fullUntil; // times are of System.nanoTime
  long checkAt;
  long usedAt;
  long turn;
  HeadraceException problem; // why it is not ready
  boolean isKnown; // whether it has answered for its health, or failed to
  boolean isAsked; // whether a question for its health is on its way
  private int checks;
  private long others; // the load that is not this client's
  private long othersUntil;

  Server(Target.Address address, ManagedChannel channel, long now) {
    this.address = address;
    this.channel = channel;
    fullUntil = now;
    checkAt = now;
    usedAt = now;
    othersUntil = now;
  }

  /** What all clients know it by; its address, as long as its instance is not known. */
  String name() {
    return instance.isEmpty() ? address.target() : instance;
  }

  void takeLoad(ServerLoad told, long now) {
    long all =
        Integer.toUnsignedLong(told.getRunning()) + Integer.toUnsignedLong(told.getWaiting());
    others = Math.max(all - outstanding, 0);
    othersUntil = now + LOAD_HOLDS;
  }

  long load(long now) {
    return now - othersUntil < 0 ? outstanding + others : outstanding;
  }

  boolean hasRoom(long now) {
    return now - fullUntil >= 0;
  }

  /** Whether it is to be asked for its health, at {@code checkAt}. */
  boolean waitsForCheck() {
    return state == State.JOINING && !isAsked;
  }

  /** Puts off the next question for its health: 0.1 s, then twice as long each time. */
  void waitForCheck(long now) {
    checkAt = now + Math.min(FIRST_CHECK << checks, Pool.CHECK_TIMEOUT);
    checks = Math.min(checks + 1, 10);
  }

  void ready() {
    state = State.READY;
    problem = null;
    checks = 0;
  }
}
