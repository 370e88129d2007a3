package dev.headrace.client;

import dev.headrace.v1.Adapter;
import dev.headrace.v1.AddRequestRequest;
import dev.headrace.v1.DetokenizeRequest;
import dev.headrace.v1.GenerateRequest;
import dev.headrace.v1.GenerateStreamRequest;
import dev.headrace.v1.GenerationServiceGrpc;
import dev.headrace.v1.GenerationSpec;
import dev.headrace.v1.GetModelRequest;
import dev.headrace.v1.ListAdaptersRequest;
import dev.headrace.v1.ModelCard;
import dev.headrace.v1.ModelServiceGrpc;
import dev.headrace.v1.TokenizeRequest;
import dev.headrace.v1.TokenizeResponse;
import io.grpc.Context;
import io.grpc.ManagedChannelBuilder;
import io.grpc.MethodDescriptor;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Supplier;
import java.util.function.UnaryOperator;

/**
 * Calls one server, or chooses among several. One client for a process is enough: it has one
 * connection for each server. Close it in the end.
 *
 * <p>A call is made in the current {@link Context}: its deadline and its cancel end the call,
 * unless it is a session's.
 */
public final class HeadraceClient implements AutoCloseable {
  /** This package's version; it is in the user agent. */
  public static final String VERSION = "0.1.0";

  /** The server of a client without a target, if the variable HEADRACE_TARGET is not set. */
  public static final String DEFAULT_TARGET = "127.0.0.1:50051";

  private static final int PAGE_SIZE = 1000; // the most that the contract has on a page

  private final Settings settings;
  private final Threads threads;
  private final Pool pool;
  private final ById byId;
  private final Set<Session> sessions = new HashSet<>(); // guarded by itself, with closed
  private boolean closed;

  private HeadraceClient(Settings settings, List<Target> places) {
    this.settings = settings;
    threads = new Threads(settings.executor);
    try {
      pool = new Pool(places, threads.timer, address -> settings.dial(address, threads.timer));
    } catch (RuntimeException refused) {
      threads.close();
      throw refused;
    }
    byId = new ById(pool, settings);
  }

  /**
   * Makes a client without further options. It does not wait for a connection.
   *
   * @param targets {@code host:port}, {@code unix:/path} or a path; or {@code dns:///name:port},
   *     each of whose addresses is a server; or several of these, also with commas between them. A
   *     missing port is 50051. None: the variable HEADRACE_TARGET, else {@link #DEFAULT_TARGET}
   * @return the client
   * @throws HeadraceException if a target has no such form
   */
  public static HeadraceClient connect(String... targets) {
    return builder(targets).build();
  }

  /**
   * What a client's options are set on.
   *
   * @param targets as {@link #connect} takes them
   * @return the builder
   */
  public static Builder builder(String... targets) {
    return new Builder(List.of(targets));
  }

  /**
   * Ends all connections and what runs on them: handles and calls that are open fail with
   * UNAVAILABLE. When it returns, nothing of the client is left.
   */
  @Override
  public void close() {
    List<Session> open;
    synchronized (sessions) {
      closed = true;
      open = List.copyOf(sessions);
    }
    open.forEach(session -> session.abort(HeadraceException.closed("the client")));
    pool.close();
    threads.close();
  }

  // ---- for this package
  // --------------------------------------------------------------------------

  Pool pool() {
    return pool;
  }

  ById byId() {
    return byId;
  }

  Executor callbacks() {
    return threads.callbacks;
  }

  int maxMessageBytes() {
    return settings.maxMessageBytes;
  }

  void forget(Session session) {
    synchronized (sessions) {
      sessions.remove(session);
    }
  }

  /** A future for users: completed by the executor for callbacks; its cancel ends the call. */
  private <T> CompletableFuture<T> forUser(
      CompletableFuture<T> inner, Context.CancellableContext context) {
    CompletableFuture<T> outer = new CompletableFuture<>();
    inner.whenComplete(
        (value, failed) -> {
          context.cancel(null);
          callbacks()
              .execute(
                  () -> {
                    if (failed == null) {
                      outer.complete(value);
                    } else {
                      outer.completeExceptionally(Futures.errorOf(failed));
                    }
                  });
        });
    outer.whenComplete((value, failed) -> context.cancel(null)); // also the user's cancel
    return outer;
  }

  private Context.CancellableContext within(Duration deadline) {
    return deadline == null
        ? Context.current().withCancellation()
        : Context.current()
            .withDeadlineAfter(Durations.nanos(deadline), TimeUnit.NANOSECONDS, threads.timer);
  }

  // ---- whole results and streams
  // -----------------------------------------------------------------

  /**
   * Runs one request and returns its whole result. An interrupt of the thread ends the request.
   *
   * @param request what to generate
   * @return the result
   * @throws HeadraceException if it failed
   */
  public Result generate(Request request) {
    return Futures.await(generateAsync(request));
  }

  /**
   * Runs one request and returns its whole result.
   *
   * @param request what to generate
   * @param deadline ends the request with the code DEADLINE_EXCEEDED; a request's own bound, which
   *     ends with a result, is {@link Request.Builder#timeLimit}
   * @return the result
   * @throws HeadraceException if it failed
   */
  public Result generate(Request request, Duration deadline) {
    return Futures.await(generateAsync(request, deadline));
  }

  /**
   * Runs one request.
   *
   * @param request what to generate
   * @return its whole result; a cancel ends the request
   */
  public CompletableFuture<Result> generateAsync(Request request) {
    return generate(request, within(null));
  }

  /**
   * Runs one request.
   *
   * @param request what to generate
   * @param deadline ends the request with the code DEADLINE_EXCEEDED
   * @return its whole result; a cancel ends the request
   */
  public CompletableFuture<Result> generateAsync(Request request, Duration deadline) {
    return generate(request, within(deadline));
  }

  private CompletableFuture<Result> generate(Request request, Context.CancellableContext context) {
    GenerationSpec spec = request.toSend();
    GenerateRequest.Builder message = GenerateRequest.newBuilder().setSpec(spec);
    message.addAllRequiredCapabilities(Capabilities.of(message.build(), List.of()));
    Attempts tries = new Attempts(pool, PrefixKeys.of(spec), settings.retries, false);
    CompletableFuture<Result> result =
        UnaryCall.begin(
                pool,
                GenerationServiceGrpc.getGenerateMethod(),
                message.build(),
                spec.getRequestId(),
                tries,
                context)
            .thenApply(
                answer -> {
                  pool.noteOwner(spec.getRequestId(), answer.message().getInstanceId());
                  return Result.of(answer.message());
                });
    return forUser(result, context);
  }

  /**
   * Streams one request. It is sent at once.
   *
   * @param request what to generate
   * @return its output, to be read to its end or closed
   */
  public GenerationStream stream(Request request) {
    return stream(request, within(null), List.of());
  }

  /**
   * Streams one request. It is sent at once.
   *
   * @param request what to generate
   * @param deadline ends the request with the code DEADLINE_EXCEEDED
   * @return its output, to be read to its end or closed
   */
  public GenerationStream stream(Request request, Duration deadline) {
    return stream(request, within(deadline), List.of());
  }

  GenerationStream stream(Request request, List<String> capabilities) {
    return stream(request, within(null), capabilities);
  }

  private GenerationStream stream(
      Request request, Context.CancellableContext context, List<String> capabilities) {
    GenerationSpec spec = request.toSend();
    GenerateStreamRequest.Builder message = GenerateStreamRequest.newBuilder().setSpec(spec);
    message.addAllRequiredCapabilities(Capabilities.of(message.build(), capabilities));
    Attempts tries = new Attempts(pool, PrefixKeys.of(spec), settings.retries, false);
    return new GenerationStream(
        callbacks(),
        new Fold(spec.getRequestId(), Request.choicesOf(spec), 1),
        new RpcSource(this, message.build(), tries, context));
  }

  // ---- many requests
  // -----------------------------------------------------------------------------

  /**
   * Opens a session without a lease and credits. It does not wait for the server: the stream opens
   * with the first request.
   *
   * @return the session, to be closed
   */
  public Session session() {
    return session(SessionOptions.DEFAULTS);
  }

  /**
   * Opens a session. It does not wait for the server: the stream opens with the first request.
   *
   * @param options how it is set up
   * @return the session, to be closed
   */
  public Session session(SessionOptions options) {
    return session(options, false);
  }

  Session session(SessionOptions options, boolean restarts) {
    synchronized (sessions) {
      if (closed) {
        throw HeadraceException.closed("the client");
      }
      Session made = new Session(this, options, restarts);
      sessions.add(made);
      return made;
    }
  }

  /**
   * Runs any number of requests, a bounded number at a time, on one session. A request that was
   * lost before its end is begun again, if it may be.
   *
   * @param requests asked for by a thread of the batch's own, when there is room for the next one
   * @param options how many at a time, and in which order outcomes come
   * @return one outcome for each request, to be read to the end or closed
   */
  public Batch batch(Iterator<Request> requests, BatchOptions options) {
    return new Batch(session(SessionOptions.DEFAULTS, true), requests, options);
  }

  /**
   * Runs any number of requests, 64 at a time, on one session.
   *
   * @param requests the requests
   * @return one outcome for each request as it ends, to be read to the end or closed
   */
  public Batch batch(Iterable<Request> requests) {
    return batch(requests.iterator(), BatchOptions.DEFAULTS);
  }

  /**
   * Holds a conversation in which the model calls tools: it streams a reply, runs its calls one
   * after the other in this thread, adds the reply and the answers to the conversation, and asks
   * again, until a reply calls none. A call that is required is so once.
   *
   * @param request the conversation, with its tools
   * @param functions what runs the calls, by their tools' names
   * @return the conversation, with the last reply
   * @throws HeadraceException if a reply failed, or the thread was interrupted
   */
  public ToolRun runTools(Request request, Map<String, ToolRun.Function> functions) {
    return runTools(request, functions, ToolRun.Options.DEFAULTS);
  }

  /**
   * Holds a conversation in which the model calls tools.
   *
   * @param request the conversation, with its tools
   * @param functions what runs the calls, by their tools' names
   * @param options how many replies, and who is told of them
   * @return the conversation, with the last reply
   * @throws HeadraceException if a reply failed, or the thread was interrupted
   */
  public ToolRun runTools(
      Request request, Map<String, ToolRun.Function> functions, ToolRun.Options options) {
    return ToolRun.hold(this, request, functions, options);
  }

  // ---- requests without a stream
  // -----------------------------------------------------------------

  /**
   * Starts a request that runs without a stream, and returns once the server has accepted it. Its
   * result is kept for {@link #result} and {@link #attach}, and for a while after its end. The same
   * call again, with the same id, starts nothing and returns the same.
   *
   * @param request what to generate
   * @return that it was accepted, with its id
   * @throws HeadraceException if it failed
   */
  public Accepted add(Request request) {
    return Futures.await(addAsync(request));
  }

  /**
   * Starts a request that runs without a stream, as {@link #add} does.
   *
   * @param request what to generate
   * @return that it was accepted, with its id
   */
  public CompletableFuture<Accepted> addAsync(Request request) {
    GenerationSpec spec = request.toSend();
    AddRequestRequest.Builder message = AddRequestRequest.newBuilder().setSpec(spec);
    message.addAllRequiredCapabilities(Capabilities.of(message.build(), List.of()));
    Attempts tries = new Attempts(pool, PrefixKeys.of(spec), settings.retries, true);
    Context.CancellableContext context = shortCall();
    CompletableFuture<Accepted> accepted =
        UnaryCall.begin(
                pool,
                GenerationServiceGrpc.getAddRequestMethod(),
                message.build(),
                spec.getRequestId(),
                tries,
                context)
            .thenApply(
                answer -> {
                  pool.noteOwner(spec.getRequestId(), answer.message().getInstanceId());
                  pool.runsAlone(spec.getRequestId(), answer.from());
                  return Accepted.of(
                      answer.message().getRequestId(), answer.message().getAccepted());
                });
    return forUser(accepted, context);
  }

  /**
   * Waits for the end of a request that runs without a stream, and returns its whole result.
   * Reading does not consume.
   *
   * @param id the request's id
   * @return the result
   * @throws HeadraceException if it failed
   */
  public Result result(String id) {
    return Futures.await(resultAsync(id, within(null)));
  }

  /**
   * Waits for the end of a request that runs without a stream, but not longer.
   *
   * @param id the request's id
   * @param atMost then the wait ends with the code DEADLINE_EXCEEDED, and the request goes on
   * @return the result
   * @throws HeadraceException if it failed
   */
  public Result result(String id, Duration atMost) {
    return Futures.await(resultAsync(id, within(atMost)));
  }

  /**
   * The whole result of a request that runs without a stream, when it has ended.
   *
   * @param id the request's id
   * @return the result; a cancel ends the wait alone
   */
  public CompletableFuture<Result> resultAsync(String id) {
    return resultAsync(id, within(null));
  }

  private CompletableFuture<Result> resultAsync(String id, Context.CancellableContext context) {
    Fold fold = new Fold(Texts.sendable("request_id", id), 0, 1);
    return forUser(byId.result(context, fold, TraceContext.current()), context);
  }

  /**
   * Streams the output of a request that runs without a stream. Several readers may do so. Leaving
   * the stream does not affect the request.
   *
   * @param id the request's id
   * @param from the number of the first event wanted; 1: all
   * @return its output, to be read to its end or closed
   */
  public GenerationStream attach(String id, long from) {
    return new GenerationStream(
        callbacks(),
        new Fold(Texts.sendable("request_id", id), 0, from),
        new PolledSource(this, id, within(null)));
  }

  /**
   * Ends requests by their ids.
   *
   * @param ids their ids
   * @return what it found of each
   * @throws HeadraceException if it failed
   */
  public Map<String, CancelStatus> cancel(Collection<String> ids) {
    return Futures.await(cancelAsync(ids));
  }

  /**
   * Ends requests by their ids.
   *
   * @param ids their ids
   * @return what it found of each
   */
  public CompletableFuture<Map<String, CancelStatus>> cancelAsync(Collection<String> ids) {
    Context.CancellableContext context = within(null);
    return forUser(byId.cancel(context, ids), context);
  }

  // ---- the model and the server
  // ------------------------------------------------------------------

  private Context.CancellableContext shortCall() {
    return settings.bounded(Context.current(), Duration.ZERO, threads.timer);
  }

  /** A short call that any server may answer. */
  private <Q, A, T> CompletableFuture<T> ask(
      MethodDescriptor<Q, A> method, Q request, Function<A, T> read) {
    return ask(method, request, settings.retries, read);
  }

  <Q, A, T> CompletableFuture<T> ask(
      MethodDescriptor<Q, A> method, Q request, int retries, Function<A, T> read) {
    Context.CancellableContext context = shortCall();
    Attempts tries = new Attempts(pool, null, retries, false);
    return forUser(
        UnaryCall.begin(pool, method, request, "", tries, context)
            .thenApply(answer -> read.apply(answer.message())),
        context);
  }

  /**
   * Describes the model and the server's limits.
   *
   * @return the contract's message
   */
  public CompletableFuture<ModelCard> model() {
    return ask(
        ModelServiceGrpc.getGetModelMethod(),
        GetModelRequest.getDefaultInstance(),
        answer -> answer.getModel());
  }

  /**
   * The adapters that the caller may use, by name; of several servers, those of one.
   *
   * @return the contract's messages
   */
  public CompletableFuture<List<Adapter>> adapters() {
    return adapters(new ArrayList<>(), "");
  }

  private CompletableFuture<List<Adapter>> adapters(List<Adapter> found, String page) {
    ListAdaptersRequest request =
        ListAdaptersRequest.newBuilder().setPageSize(PAGE_SIZE).setPageToken(page).build();
    return ask(ModelServiceGrpc.getListAdaptersMethod(), request, Function.identity())
        .thenCompose(
            answer -> {
              found.addAll(answer.getAdaptersList());
              String next = answer.getNextPageToken();
              return next.isEmpty()
                  ? CompletableFuture.completedFuture(List.copyOf(found))
                  : adapters(found, next);
            });
  }

  /**
   * What operators do at a server.
   *
   * @return the calls
   * @throws HeadraceException if the client has several servers: make one of the address of that
   *     which is meant
   */
  public Control control() {
    if (pool.many) {
      throw HeadraceException.invalid(
          "target", "names several servers; control is of one, so make a client of its address");
    }
    return new Control(this);
  }

  /**
   * The token ids of a request's prompt, text or a conversation, exactly as the request would have
   * them. What else the request says is not looked at.
   *
   * @param request the request
   * @return unsigned numbers of 32 bits
   */
  public CompletableFuture<List<Long>> tokenize(Request request) {
    return tokenize(request, false, answer -> UnsignedInts.of(answer.getTokenIdsList()));
  }

  /**
   * The tokens of a request's prompt, each with its text and bytes.
   *
   * @param request the request
   * @return the tokens
   */
  public CompletableFuture<List<Token>> tokenizeDetails(Request request) {
    return tokenize(request, true, answer -> Token.of(answer.getTokensList()));
  }

  private <T> CompletableFuture<T> tokenize(
      Request request, boolean details, Function<TokenizeResponse, T> read) {
    TokenizeRequest.Builder message = TokenizeRequest.newBuilder().setTokenDetails(details);
    switch (request.spec().getInputCase()) {
      case TEXT -> message.setText(request.spec().getText());
      case CHAT -> message.setChat(request.spec().getChat());
      default -> throw HeadraceException.invalid("input", "is no text and no conversation");
    }
    message.addAllRequiredCapabilities(Capabilities.of(message.build(), List.of()));
    return ask(ModelServiceGrpc.getTokenizeMethod(), message.build(), read);
  }

  /**
   * The text of token ids, without special tokens.
   *
   * @param ids unsigned numbers of 32 bits
   * @return the text
   */
  public CompletableFuture<String> detokenize(Collection<? extends Number> ids) {
    DetokenizeRequest message =
        DetokenizeRequest.newBuilder()
            .addAllTokenIds(Request.tokens(ids).build().spec().getTokens().getIdsList())
            .build();
    return ask(ModelServiceGrpc.getDetokenizeMethod(), message, answer -> answer.getText());
  }

  /**
   * Whether a server is ready for requests. A server that loads its model is not.
   *
   * @return it fails if none can be reached
   */
  public CompletableFuture<Boolean> ready() {
    return ask(
        HealthGrpc.getCheckMethod(),
        HealthCheckRequest.newBuilder().setService(Pool.GENERATION_SERVICE).build(),
        answer -> answer.getStatus() == ServingStatus.SERVING);
  }

  // ---- how a client is set up
  // --------------------------------------------------------------------

  /** Sets up a client. It is used by one thread. */
  public static final class Builder {
    private final List<String> targets;
    private final Settings settings = new Settings();

    private Builder(List<String> targets) {
      this.targets = targets;
    }

    /**
     * Makes the client. It does not wait for a connection. The builder is not used after that.
     *
     * @return the client
     * @throws HeadraceException if a value cannot be used
     */
    public HeadraceClient build() {
      List<String> given = targets;
      if (given.isEmpty() || given.equals(List.of(""))) {
        String told = System.getenv("HEADRACE_TARGET");
        given = List.of(told == null || told.isEmpty() ? DEFAULT_TARGET : told);
      }
      List<Target> places = Target.parse(given);
      settings.checkToken(places);
      return new HeadraceClient(settings, places);
    }

    /**
     * Encrypts the connection, and trusts the authorities that Java trusts. Without this, {@link
     * #caFile} and {@link #clientCertificate} connections are plaintext.
     *
     * @return this
     */
    public Builder tls() {
      settings.tls = true;
      return this;
    }

    /**
     * Encrypts the connection, and trusts the authorities in a file instead of Java's.
     *
     * @param pem a file in PEM form
     * @return this
     */
    public Builder caFile(Path pem) {
      settings.tls = true;
      settings.caFile = pem;
      return this;
    }

    /**
     * Encrypts the connection, and shows the server who calls.
     *
     * @param certificate a file in PEM form, with its chain
     * @param privateKey a file in PEM form, PKCS #8
     * @return this
     */
    public Builder clientCertificate(Path certificate, Path privateKey) {
      settings.tls = true;
      settings.certificate = certificate;
      settings.privateKey = privateKey;
      return this;
    }

    /**
     * The name that the server's certificate has, if it is not that of the target.
     *
     * @param name the name
     * @return this
     */
    public Builder serverName(String name) {
      settings.serverName = name;
      return this;
    }

    /**
     * Sends a token with every call. Without TLS it is refused, unless all servers are on this
     * machine.
     *
     * @param token the token
     * @return this
     */
    public Builder token(String token) {
      return token(() -> token);
    }

    /**
     * Sends a token with every call.
     *
     * @param token is called for each call, and may wait
     * @return this
     */
    public Builder token(Supplier<String> token) {
      settings.token = token;
      return this;
    }

    /**
     * Sends the token that a file has, without blanks around it. The file is read again when it has
     * changed, so that a token can be replaced while the client is in use.
     *
     * @param path the file
     * @return this
     */
    public Builder tokenFile(Path path) {
      return token(new Settings.TokenFile(path));
    }

    /**
     * Lets the token travel to other machines in clear text.
     *
     * @return this
     */
    public Builder allowPlaintextToken() {
      settings.mayLeakToken = true;
      return this;
    }

    /**
     * Sends a pair of key and value with every call.
     *
     * @param key its key, in lower case
     * @param value its value, in ASCII
     * @return this
     */
    public Builder metadata(String key, String value) {
      settings.metadata.put(key, value);
      return this;
    }

    /**
     * How often a call that may be tried again without harm is tried again. That is a unary call
     * that ended with UNAVAILABLE, or with RESOURCE_EXHAUSTED and advice when to come again; and,
     * with several servers, a stream that has given nothing yet.
     *
     * @param times 3, if it is not set
     * @return this
     */
    public Builder retries(int times) {
      if (times < 0) {
        throw HeadraceException.invalid("retries", times + " is not at least 0");
      }
      settings.retries = times;
      return this;
    }

    /**
     * How long short calls may take: all but those that wait for output.
     *
     * @param limit 30 s, if it is not set; zero: no limit but the context's
     * @return this
     */
    public Builder callTimeout(Duration limit) {
      settings.callTimeout = limit;
      return this;
    }

    /**
     * The size of the largest message, both ways.
     *
     * @param size 16 MiB, if it is not set
     * @return this
     */
    public Builder maxMessageBytes(int size) {
      settings.maxMessageBytes = size;
      return this;
    }

    /**
     * How often a quiet connection is asked whether it is there.
     *
     * @param every 45 s, if it is not set; gRPC allows no less than 10 s; zero: never
     * @return this
     */
    public Builder keepalive(Duration every) {
      settings.keepalive = every;
      return this;
    }

    /**
     * Who runs callbacks: what is done with futures, and subscribers. It must not run them in the
     * thread that calls it.
     *
     * @param executor threads of the client's own, if it is not set: as many as processors, at
     *     least 4
     * @return this
     */
    public Builder executor(Executor executor) {
      settings.executor = executor;
      return this;
    }

    /**
     * Changes gRPC's channels, for interceptors and other options. It comes after this package's
     * own.
     *
     * @param change is called for the channel of each server
     * @return this
     */
    public Builder channel(UnaryOperator<ManagedChannelBuilder<?>> change) {
      settings.changes.add(change);
      return this;
    }
  }
}
