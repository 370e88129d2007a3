package dev.headrace.client;

import io.grpc.CallCredentials;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ConnectivityState;
import io.grpc.Context;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.ManagedChannelProvider;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.FileTime;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import java.util.function.UnaryOperator;

/**
 * How a client is set up, and the connections that it makes so. It is not changed once it is used.
 */
final class Settings {
  private static final String USER_AGENT = "headrace-java/" + HeadraceClient.VERSION;
  private static final Duration KEEPALIVE_TIMEOUT = Duration.ofSeconds(20);
  private static final long FIRST_BACKOFF = Pool.millis(200);
  private static final long LONGEST_BACKOFF = Pool.seconds(5);

  boolean tls;
  Path caFile;
  Path certificate;
  Path privateKey;
  String serverName = "";
  Supplier<String> token;
  boolean mayLeakToken;
  final Map<String, String> metadata = new LinkedHashMap<>();
  int retries = 3;
  Duration callTimeout = Duration.ofSeconds(30);
  int maxMessageBytes = 16 << 20;
  Duration keepalive = Duration.ofSeconds(45);
  Executor executor;
  final List<UnaryOperator<ManagedChannelBuilder<?>>> changes = new ArrayList<>();

  /**
   * A short call's context: it ends after the time for such calls, which may wait so long besides.
   */
  Context.CancellableContext bounded(
      Context context, Duration wait, ScheduledExecutorService timer) {
    if (callTimeout.isZero()) {
      return context.withCancellation();
    }
    return context.withDeadlineAfter(
        Durations.nanos(callTimeout.plus(wait)), TimeUnit.NANOSECONDS, timer);
  }

  /** Refuses a token that would travel in clear text. */
  void checkToken(List<Target> places) {
    if (token == null || tls || mayLeakToken) {
      return;
    }
    for (Target one : places) {
      if (!one.isLocal()) {
        throw HeadraceException.invalid(
            "token",
            "it would travel to "
                + one
                + " in clear text: use tls(), or allowPlaintextToken() to accept that");
      }
    }
  }

  ManagedChannel dial(Target.Address to, ScheduledExecutorService timer) {
    ManagedChannelBuilder<?> builder =
        opening(to)
            .userAgent(USER_AGENT)
            .disableRetry() // here it is decided what is tried again
            .defaultLoadBalancingPolicy("pick_first")
            .maxInboundMessageSize(maxMessageBytes)
            .intercept(new Outgoing()); // the first one is called last: it sees what others add
    if (!keepalive.isZero()) {
      builder
          .keepAliveTime(Durations.nanos(keepalive), TimeUnit.NANOSECONDS)
          .keepAliveTimeout(KEEPALIVE_TIMEOUT.toNanos(), TimeUnit.NANOSECONDS);
    }
    String name = serverName.isEmpty() ? to.serverName() : serverName;
    if (!name.isEmpty()) {
      builder.overrideAuthority(name);
    }
    for (UnaryOperator<ManagedChannelBuilder<?>> change : changes) {
      builder = change.apply(builder);
    }
    ManagedChannel channel = builder.build();
    new Reconnection(channel, timer).watch();
    return channel;
  }

  private ManagedChannelBuilder<?> opening(Target.Address to) {
    ManagedChannelBuilder<?> builder;
    try {
      builder = Grpc.newChannelBuilder(to.dialTarget(), credentials());
    } catch (ManagedChannelProvider.ProviderNotFoundException | IllegalArgumentException refused) {
      throw HeadraceException.invalid(
          "target", to.target() + " cannot be used here: " + refused.getMessage());
    }
    if (to.target().startsWith("unix:") && builder instanceof NettyChannelBuilder netty) {
      netty.withOption(ChannelOption.SO_KEEPALIVE, null); // Netty would warn that there is none
    }
    return builder;
  }

  private ChannelCredentials credentials() {
    if (!tls) {
      return InsecureChannelCredentials.create();
    }
    TlsChannelCredentials.Builder made = TlsChannelCredentials.newBuilder();
    try {
      if (caFile != null) {
        made.trustManager(caFile.toFile());
      }
      if (certificate != null) {
        made.keyManager(certificate.toFile(), privateKey.toFile());
      }
    } catch (IOException unreadable) {
      throw HeadraceException.invalid("tls", "cannot be read: " + unreadable.getMessage());
    }
    return made.build();
  }

  /** Adds to every call what travels in its metadata. */
  private final class Outgoing implements ClientInterceptor {
    private final CallCredentials bearer = token == null ? null : new Bearer(token);

    @Override
    public <Q, A> ClientCall<Q, A> interceptCall(
        MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
      CallOptions more = options.withMaxOutboundMessageSize(maxMessageBytes);
      if (bearer != null) {
        more = more.withCallCredentials(bearer);
      }
      return new SimpleForwardingClientCall<>(next.newCall(method, more)) {
        @Override
        public void start(Listener<A> listener, Metadata headers) {
          metadata.forEach((key, value) -> headers.put(ascii(key), value));
          if (!headers.containsKey(ascii(TraceContext.NAMES.get(0)))) { // an instrumentation's
            options.getOption(Calls.TRACE).forEach((key, value) -> headers.put(ascii(key), value));
          }
          super.start(listener, headers);
        }
      };
    }
  }

  private static Metadata.Key<String> ascii(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  /** Sends a token with every call. */
  private static final class Bearer extends CallCredentials {
    private static final Metadata.Key<String> AUTHORIZATION = ascii("authorization");
    private final Supplier<String> token;

    Bearer(Supplier<String> token) {
      this.token = token;
    }

    @Override
    public void applyRequestMetadata(
        RequestInfo request, Executor executor, MetadataApplier applier) {
      executor.execute(
          () -> {
            try {
              Metadata headers = new Metadata();
              headers.put(AUTHORIZATION, "Bearer " + token.get());
              applier.apply(headers);
            } catch (RuntimeException failed) {
              applier.fail(
                  Status.UNAUTHENTICATED.withDescription(failed.getMessage()).withCause(failed));
            }
          });
    }
  }

  /** The token that a file has, read again when the file has changed. */
  static final class TokenFile implements Supplier<String> {
    private final Path path;
    private String token = "";
    private FileTime changed;
    private long size;

    TokenFile(Path path) {
      this.path = path;
    }

    @Override
    public synchronized String get() {
      try {
        FileTime now = Files.getLastModifiedTime(path);
        if (token.isEmpty() || !now.equals(changed) || Files.size(path) != size) {
          String told = Files.readString(path).strip();
          if (told.isEmpty()) {
            throw HeadraceException.invalid("token", "the file " + path + " is empty");
          }
          token = told;
          changed = now;
          size = Files.size(path);
        }
        return token;
      } catch (IOException unreadable) {
        throw new UncheckedIOException("the token file " + path + " cannot be read", unreadable);
      }
    }
  }

  /**
   * Has a lost server looked for after 0.2 s to 5 s, not within gRPC's two minutes, which cannot be
   * set in Java.
   */
  private static final class Reconnection {
    private final ManagedChannel channel;
    private final ScheduledExecutorService timer;
    private long pause = FIRST_BACKOFF;
    private boolean isDue;

    Reconnection(ManagedChannel channel, ScheduledExecutorService timer) {
      this.channel = channel;
      this.timer = timer;
    }

    synchronized void watch() {
      ConnectivityState state = channel.getState(false);
      if (state == ConnectivityState.SHUTDOWN) {
        return;
      }
      if (state == ConnectivityState.READY) {
        pause = FIRST_BACKOFF;
      } else if (state == ConnectivityState.TRANSIENT_FAILURE && !isDue) {
        isDue = true;
        timer.schedule(this::connect, pause, TimeUnit.NANOSECONDS);
        pause = Math.min(pause * 8 / 5, LONGEST_BACKOFF);
      }
      channel.notifyWhenStateChanged(state, this::watch);
    }

    private synchronized void connect() {
      isDue = false;
      if (channel.getState(false) == ConnectivityState.TRANSIENT_FAILURE) {
        channel.resetConnectBackoff();
        isDue = true; // that may fail without a change of the state
        timer.schedule(this::connect, pause, TimeUnit.NANOSECONDS);
        pause = Math.min(pause * 8 / 5, LONGEST_BACKOFF);
      }
    }
  }
}
