package dev.headrace.client;

import dev.headrace.v1.GetModelRequest;
import dev.headrace.v1.ModelServiceGrpc;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import java.net.UnknownHostException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Predicate;
import java.util.stream.Collectors;

/**
 * A client's servers, and the choice among them by docs/fleet.md. With one server there is no
 * choice: it is always ready, and gRPC connects to it. Its monitor guards what changes; nothing of
 * a user's runs while it is held, and no session's lock is taken.
 */
final class Pool {
  static final String GENERATION_SERVICE = "headrace.v1.GenerationService";
  static final long CHECK_TIMEOUT = seconds(2); // and the longest pause between two checks
  static final long PATIENCE = seconds(5); // how long a request waits for a server to be ready

  private static final long RESOLVE_EVERY = 3_000; // ms
  private static final long RESOLVE_PAUSE = 500; // ms, between two look-ups, after failures
  private static final long TOGETHER = millis(100); // how long a ready one waits for the others
  private static final long TWIN_PAUSE = seconds(10);
  private static final long LEFT_FOR = seconds(60);
  private static final long ALONE_FOR = seconds(60);
  private static final long NEVER = seconds(3600);
  private static final int MOST_OWNERS = 65_536;

  final ScheduledExecutorService timer;
  final boolean many;
  final Budget budget = new Budget();

  private final Function<Target.Address, ManagedChannel> dial;
  private List<Server> servers = new ArrayList<>();
  private final Set<Pause> pauses = new HashSet<>();
  private final Set<Pause> watchers = new HashSet<>(); // those that a change of servers ends
  private final Set<Session> sessions = new HashSet<>();
  private final Placement placement = new Placement();
  private final Recent<String> owners = new Recent<>(MOST_OWNERS); // by request: its instance
  private final Map<String, Alone> alone = new HashMap<>();
  private final Thread names; // looks names up; null: there are none
  private boolean kicked; // whether names are to be looked up now
  private long turn;
  private String unresolved = ""; // why a name could not be looked up
  private final Map<Server, Identity> found = new LinkedHashMap<>(); // ready, and not used yet
  private long tellAt; // when those are used at the latest
  private Future<?> nextCheck;
  private boolean closed;

  /** A request without a call: its server's load until it was seen to end, or for a minute. */
  private record Alone(Server server, long until) {}

  static long seconds(long count) {
    return TimeUnit.SECONDS.toNanos(count);
  }

  static long millis(long count) {
    return TimeUnit.MILLISECONDS.toNanos(count);
  }

  Pool(
      List<Target> places,
      ScheduledExecutorService timer,
      Function<Target.Address, ManagedChannel> dial) {
    this.timer = timer;
    this.dial = dial;
    many = places.size() > 1 || places.get(0).isName();
    boolean hasNames = places.stream().anyMatch(Target::isName);
    names = hasNames ? new Thread(() -> resolve(places), "headrace-names") : null;
    try {
      list(
          places.stream()
              .filter(place -> !place.isName())
              .map(place -> new Target.Address(place.address(), ""))
              .toList());
    } catch (RuntimeException refused) {
      close(); // the connections before the one that cannot be
      throw refused;
    }
    if (!many) {
      servers.get(0).state = Server.State.READY;
    }
    if (names != null) {
      names.setDaemon(true);
      names.start();
    }
  }

  /** Ends all connections. */
  void close() {
    List<Server> left;
    List<Pause> waiting;
    synchronized (this) {
      closed = true;
      left = List.copyOf(servers);
      waiting = List.copyOf(pauses);
      if (names != null) {
        names.interrupt();
      }
    }
    waiting.forEach(pause -> pause.complete(null));
    left.forEach(one -> one.channel.shutdownNow());
    long end = System.nanoTime() + PATIENCE;
    boolean wasInterrupted = false;
    for (Server one : left) {
      try {
        one.channel.awaitTermination(end - System.nanoTime(), TimeUnit.NANOSECONDS);
      } catch (InterruptedException asked) {
        wasInterrupted = true; // the rest ends by itself
      }
    }
    if (wasInterrupted) {
      Thread.currentThread().interrupt();
    }
  }

  synchronized boolean isClosed() {
    return closed;
  }

  // ---- waits -----------------------------------------------------------------------------------

  /** A wait for so long, or until the client is closed. */
  Pause pause(Context context, long nanos) {
    Pause made = Pause.begin(timer, context, Math.max(nanos, 0));
    boolean isOver;
    synchronized (this) {
      isOver = closed;
      pauses.add(made);
    }
    made.whenComplete((nothing, ended) -> forget(made));
    if (isOver) {
      made.complete(null);
    }
    return made;
  }

  /** A wait for so long, or until the servers change. It is called while the lock is held. */
  synchronized Pause change(Context context, long nanos) {
    Pause made = pause(context, nanos);
    watchers.add(made);
    made.whenComplete((nothing, ended) -> forget(made));
    return made;
  }

  private synchronized void forget(Pause made) {
    pauses.remove(made);
    watchers.remove(made);
  }

  /** Wakes those who wait for a server; the lock is held. */
  private void changed() {
    List<Pause> waiting = List.copyOf(watchers);
    watchers.clear();
    timer.execute(() -> waiting.forEach(pause -> pause.complete(null)));
    if (many) {
      timer.execute(this::check);
    }
  }

  synchronized void listen(Session session) {
    sessions.add(session);
  }

  synchronized void ignore(Session session) {
    sessions.remove(session);
  }

  // ---- which servers there are -----------------------------------------------------------------

  /** Takes the addresses that there are now. */
  private synchronized void list(List<Target.Address> addresses) {
    if (closed) {
      return;
    }
    long now = System.nanoTime();
    Map<Target.Address, Server> known = new HashMap<>();
    servers.forEach(one -> known.put(one.address, one));
    for (Target.Address wanted : addresses) {
      Server one = known.get(wanted);
      if (one == null) {
        servers.add(new Server(wanted, dial.apply(wanted), now));
      } else if (one.state == Server.State.LEAVING) {
        one.state = Server.State.JOINING;
        one.checkAt = now;
      }
    }
    for (Iterator<Server> each = servers.iterator(); each.hasNext(); ) {
      Server one = each.next();
      if (!addresses.contains(one.address)) {
        one.state = Server.State.LEAVING;
        if (one.outstanding == 0 && now - one.usedAt > LEFT_FOR) {
          one.channel.shutdownNow();
          each.remove();
        }
      }
    }
    changed();
  }

  /** Looks names up, every few seconds and soon after failures, on a thread of its own. */
  private void resolve(List<Target> places) {
    Map<Target, List<Target.Address>> known = new HashMap<>();
    while (!isClosed()) {
      List<Target.Address> addresses = new ArrayList<>();
      for (Target one : places) {
        if (!one.isName()) {
          addresses.add(new Target.Address(one.address(), ""));
          continue;
        }
        try {
          known.put(one, one.resolve());
        } catch (UnknownHostException failed) {
          synchronized (this) {
            unresolved = one.host() + " cannot be looked up: " + failed.getMessage();
          }
        }
        addresses.addAll(known.getOrDefault(one, List.of()));
      }
      list(addresses);
      try {
        synchronized (this) {
          long end = System.nanoTime() + millis(RESOLVE_EVERY);
          for (long left = RESOLVE_EVERY; !kicked && left > 0; ) {
            wait(left);
            left = TimeUnit.NANOSECONDS.toMillis(end - System.nanoTime());
          }
          kicked = false;
        }
        Thread.sleep(RESOLVE_PAUSE);
      } catch (InterruptedException closing) {
        return;
      }
    }
  }

  /**
   * Asks servers that are not ready whether they are. Each answer is taken as it comes: none waits
   * for the others, but for a moment with those that are ready.
   */
  private void check() {
    List<Server> due;
    List<Session> told = List.of();
    synchronized (this) {
      if (closed) {
        return;
      }
      if (nextCheck != null) {
        nextCheck.cancel(false);
      }
      long now = System.nanoTime();
      due = toAsk(now);
      if (tell(now)) {
        changed();
        told = List.copyOf(sessions);
      }
      nextCheck = timer.schedule(this::check, untilCheck(now), TimeUnit.NANOSECONDS);
    }
    due.forEach(this::ask);
    told.forEach(Session::serverChanged);
  }

  /** The servers whose health is to be asked for now; the lock is held. */
  private List<Server> toAsk(long now) {
    List<Server> due = new ArrayList<>();
    for (Server one : servers) {
      if (one.waitsForCheck() && one.checkAt - now <= 0) {
        one.isAsked = true;
        one.waitForCheck(now);
        due.add(one);
      }
    }
    return due;
  }

  /** How long it takes until one is to be asked, or those found are to be used; with the lock. */
  private long untilCheck(long now) {
    long next = found.isEmpty() ? NEVER : tellAt - now;
    for (Server one : servers) {
      if (one.waitsForCheck()) {
        next = Math.min(next, one.checkAt - now);
      }
    }
    return next;
  }

  /** What a server says of itself. */
  private record Identity(String instance, int capacity) {}

  /** Asks a server for its health, and a ready one for its instance and capacity. */
  private void ask(Server one) {
    Context.CancellableContext context =
        Context.ROOT.withDeadlineAfter(CHECK_TIMEOUT, TimeUnit.NANOSECONDS, timer);
    identify(one, context)
        .whenComplete(
            (identity, failed) -> {
              context.cancel(null);
              noteAnswer(one, identity, failed);
            });
  }

  /**
   * Notes a server's answer, or that there is none. A ready server is used together with the others
   * that are asked, so that the first requests are not all placed on the first that answers; but it
   * does not wait long for them.
   */
  private synchronized void noteAnswer(Server one, Identity identity, Throwable failed) {
    if (closed) {
      return;
    }
    if (failed != null) {
      one.problem = Futures.errorOf(failed);
      one.isKnown = true;
      one.isAsked = false;
    } else {
      if (found.isEmpty()) {
        tellAt = System.nanoTime() + TOGETHER;
      }
      found.put(one, identity);
    }
    changed();
  }

  /** Makes the servers that were found ready, if it is time; whether there were any. */
  private boolean tell(long now) {
    boolean areAllFound = servers.stream().allMatch(one -> !one.isAsked || found.containsKey(one));
    if (found.isEmpty() || (now - tellAt < 0 && !areAllFound)) {
      return false;
    }
    found.forEach(this::joined);
    found.clear();
    return true;
  }

  /** Makes a server ready, unless it is known by another address already; the lock is held. */
  private void joined(Server one, Identity identity) {
    one.isKnown = true;
    one.isAsked = false;
    one.instance = identity.instance;
    one.capacity = Math.max(identity.capacity, 1);
    if (one.state != Server.State.JOINING) {
      return;
    }
    for (Server twin : byInstance(one.instance)) {
      if (twin != one && twin.state == Server.State.READY) {
        one.checkAt = System.nanoTime() + TWIN_PAUSE;
        return;
      }
    }
    one.ready();
  }

  private CompletableFuture<Identity> identify(Server one, Context context) {
    HealthCheckRequest health =
        HealthCheckRequest.newBuilder().setService(GENERATION_SERVICE).build();
    return Calls.unary(one, HealthGrpc.getCheckMethod(), health, context, Map.of(), "")
        .thenCompose(
            answer -> {
              if (answer.getStatus() != ServingStatus.SERVING) {
                throw HeadraceException.unavailable(
                    "the server at " + one.address.target() + " is not ready");
              }
              return describe(one, context);
            });
  }

  private CompletableFuture<Identity> describe(Server one, Context context) {
    GetModelRequest model = GetModelRequest.getDefaultInstance();
    return Calls.unary(one, ModelServiceGrpc.getGetModelMethod(), model, context, Map.of(), "")
        .thenApply(
            answer ->
                new Identity(
                    answer.getModel().getInstanceId(),
                    answer.getModel().getLimits().getMaxRunningRequests()))
        .exceptionally(
            failed -> {
              HeadraceException error = Futures.errorOf(failed);
              if (error.code() == Status.Code.UNAVAILABLE) {
                throw error;
              }
              return new Identity("", 1); // a caller that may not ask for the model gets neither
            });
  }

  /** Whether all servers were asked whether they are ready. */
  synchronized boolean isSettled() {
    return !servers.isEmpty() && servers.stream().allMatch(one -> one.isKnown);
  }

  /** Waits until all servers were asked whether they are ready, but not long. */
  CompletableFuture<Void> settle(Context context) {
    return settle(context, System.nanoTime() + PATIENCE);
  }

  private CompletableFuture<Void> settle(Context context, long end) {
    Pause waits;
    synchronized (this) {
      long left = end - System.nanoTime();
      if (!many || closed || left <= 0 || isSettled()) {
        return CompletableFuture.completedFuture(null);
      }
      waits = change(context, left);
    }
    return waits.thenCompose(nothing -> settle(context, end));
  }

  // ---- which server a request goes to ----------------------------------------------------------

  /**
   * The server for a request; null: none is ready and has room. One to avoid is better than none;
   * one that lacks what the request needs is not.
   */
  synchronized Server choose(
      PrefixKeys keys, Set<Server> avoid, Set<Server> lacking, boolean evenFull) {
    if (!many) {
      return servers.get(0);
    }
    long now = System.nanoTime();
    List.copyOf(alone.entrySet())
        .forEach(
            one -> {
              if (one.getValue().until - now < 0) {
                endedAlone(one.getKey());
              }
            });
    List<Server> from = ready(lacking, one -> one.hasRoom(now) && !avoid.contains(one));
    if (from.isEmpty()) {
      from = ready(lacking, one -> one.hasRoom(now));
    }
    if (from.isEmpty() && evenFull) {
      from = ready(lacking, one -> !avoid.contains(one));
      if (from.isEmpty()) {
        from = ready(lacking, one -> true);
      }
    }
    if (from.isEmpty()) {
      return null;
    }
    List<Placement.Candidate> candidates =
        from.stream()
            .map(one -> new Placement.Candidate(one.name(), one.load(now), one.capacity, one.turn))
            .toList();
    String chosen = placement.choose(keys, candidates);
    return from.stream().filter(one -> one.name().equals(chosen)).findFirst().orElseThrow();
  }

  private List<Server> ready(Set<Server> lacking, Predicate<Server> fits) {
    return servers.stream()
        .filter(one -> one.state == Server.State.READY && !lacking.contains(one) && fits.test(one))
        .collect(Collectors.toList());
  }

  /**
   * In how many nanoseconds a ready server has room, as these said; negative: none is ready but
   * those that lack what the request needs.
   */
  synchronized long roomIn(Set<Server> lacking) {
    long now = System.nanoTime();
    return ready(lacking, one -> true).stream()
        .mapToLong(one -> Math.max(one.fullUntil - now, 0))
        .min()
        .orElse(-1);
  }

  /** Notes that a request goes to a server. */
  synchronized void begun(Server one) {
    one.turn = ++turn;
    one.outstanding++;
    one.usedAt = System.nanoTime();
  }

  /** Notes that a request has ended there, or goes elsewhere. */
  synchronized void over(Server one) {
    one.outstanding--;
    one.usedAt = System.nanoTime();
  }

  synchronized boolean failedWithinBudget() {
    return budget.failed();
  }

  synchronized void succeeded() {
    budget.succeeded();
  }

  /** What a server's failure says of it: it has no room for a while, or is not ready. */
  synchronized void noteFailure(Server one, HeadraceException error) {
    if (error.code() == Status.Code.RESOURCE_EXHAUSTED) {
      long until = System.nanoTime() + Durations.nanos(error.retryAfter().orElse(Duration.ZERO));
      if (until - one.fullUntil > 0) {
        one.fullUntil = until;
      }
      return;
    }
    setAside(one, error);
  }

  /** Has a server asked for its health before it gets anything new. */
  synchronized void setAside(Server one, HeadraceException problem) {
    if (!many) {
      return;
    }
    one.problem = problem;
    if (one.state == Server.State.LEAVING) {
      return;
    }
    one.state = Server.State.JOINING;
    long now = System.nanoTime();
    one.waitForCheck(now);
    for (Server twin : byInstance(one.instance)) {
      if (twin.state == Server.State.JOINING && twin != one) {
        twin.checkAt = now;
      }
    }
    kicked = true;
    notifyAll(); // the thread that looks names up
    changed();
  }

  // ---- who has what ----------------------------------------------------------------------------

  synchronized void runsAlone(String id, Server one) {
    endedAlone(id);
    alone.put(id, new Alone(one, System.nanoTime() + ALONE_FOR));
    begun(one);
  }

  synchronized void endedAlone(String id) {
    Alone found = alone.remove(id);
    if (found != null) {
      over(found.server);
    }
  }

  synchronized void noteInstance(Server one, String instance) {
    one.instance = instance;
  }

  synchronized void noteLoad(Server one, dev.headrace.v1.ServerLoad load) {
    one.takeLoad(load, System.nanoTime());
  }

  /** Notes the instance that has a request. */
  synchronized void noteOwner(String id, String instance) {
    if (!instance.isEmpty() && many) {
      owners.put(id, instance);
    }
  }

  /** The instance that has a request; empty: it is not known. */
  synchronized String owner(String id) {
    String found = owners.get(id);
    return found == null ? "" : found;
  }

  /** The servers that are this instance, the ready ones first. */
  synchronized List<Server> byInstance(String instance) {
    return servers.stream()
        .filter(one -> !instance.isEmpty() && one.instance.equals(instance))
        .sorted(Comparator.comparing(one -> one.state != Server.State.READY))
        .toList();
  }

  /** The servers that may answer for what they have. */
  synchronized List<Server> reachable() {
    return servers.stream().filter(one -> one.state != Server.State.JOINING).toList();
  }

  /** The one server of a client that has no choice. */
  synchronized Server only() {
    return servers.get(0);
  }

  /** The error for a request that found no server. */
  synchronized HeadraceException nobody() {
    String told =
        servers.stream()
            .filter(one -> one.problem != null)
            .map(one -> one.problem.getMessage())
            .distinct()
            .collect(Collectors.joining("; "));
    if (told.isEmpty()) {
      told = unresolved.isEmpty() ? "no answer yet" : unresolved;
    }
    String message = "none of " + servers.size() + " servers is ready: " + told;
    return servers.stream()
        .filter(one -> one.problem != null && !one.problem.reason().isEmpty())
        .map(one -> one.problem.withMessage(message))
        .findFirst()
        .orElseGet(() -> HeadraceException.unavailable(message));
  }

  @Override
  public synchronized String toString() {
    return servers.stream().map(one -> one.address.target()).collect(Collectors.joining(","));
  }
}
