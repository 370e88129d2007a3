package dev.headrace.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/** What a call, or one request of a session, ended with. */
public final class HeadraceException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  static final String REASON_MOVED = "REQUEST_MOVED";
  static final String REASON_WRONG_INSTANCE = "WRONG_INSTANCE";

  private static final String REASON_ADAPTER_NOT_LOADED = "ADAPTER_NOT_LOADED";

  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final Metadata.Key<String> PUSHBACK =
      Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);

  /** Where an error comes from: what the code alone does not tell. */
  enum Origin {
    /** The server, or the way to it. */
    SERVER,
    /** A deadline, an interrupt or a cancel of the caller's. */
    CALLER,
    /** The client or the session was closed. */
    CLOSED,
    /** The server broke the contract. */
    PROTOCOL
  }

  /** The status code. */
  private final Status.Code code;

  /** The server's reason; empty: none. */
  private final String reason;

  /** What belongs to the reason. */
  private final Map<String, String> metadata;

  /** The refused fields; null, as the output is, in an exception that was serialized. */
  private final transient List<FieldViolation> fields;

  /** When to try again; null: not told. */
  private final Duration retryAfter;

  /** Whether the server has said that trying again is of no use. */
  private final boolean neverAgain;

  /** Where it comes from. */
  private final Origin origin;

  /** Which request failed; empty: not known. */
  private final String requestId;

  /** The output until then; null: none. */
  private final transient Result partial;

  private HeadraceException(
      Status.Code code,
      String message,
      String reason,
      Map<String, String> metadata,
      List<FieldViolation> fields,
      Optional<Duration> retryAfter,
      boolean neverAgain,
      Origin origin,
      String requestId,
      Optional<Result> partial,
      Throwable cause) {
    super(message, cause);
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
    this.fields = fields;
    this.retryAfter = retryAfter.orElse(null);
    this.neverAgain = neverAgain;
    this.origin = origin;
    this.requestId = requestId;
    this.partial = partial.orElse(null);
  }

  /**
   * The status code.
   *
   * @return gRPC's; UNKNOWN for one that is newer than this package
   */
  public Status.Code code() {
    return code;
  }

  /**
   * The server's machine-readable reason, such as {@code QUEUE_FULL}.
   *
   * @return empty: it gave none, or the error was made here or on the way
   */
  public String reason() {
    return reason;
  }

  /**
   * More values that belong to the reason; {@code error_id} is what the operator looks for.
   *
   * @return by name
   */
  public Map<String, String> metadata() {
    return metadata;
  }

  /**
   * The fields of the request that were refused.
   *
   * @return in the server's order
   */
  public List<FieldViolation> fields() {
    return fields == null ? List.of() : fields;
  }

  /**
   * When to try again.
   *
   * @return empty: the server did not say
   */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /**
   * Which request failed.
   *
   * @return empty: not known, or the call was about none
   */
  public String requestId() {
    return requestId;
  }

  /**
   * The output that had arrived before a streamed request failed.
   *
   * @return empty: none
   */
  public Optional<Result> partial() {
    return Optional.ofNullable(partial);
  }

  /**
   * Whether the client or the session was closed.
   *
   * @return then nothing more can be done with it
   */
  public boolean isClosed() {
    return origin == Origin.CLOSED;
  }

  /**
   * Whether another stream attached the request.
   *
   * @return then its results continue there
   */
  public boolean isMoved() {
    return reason.equals(REASON_MOVED);
  }

  /**
   * Whether the server broke the contract: an event was missing, came twice or out of order.
   *
   * @return then the output until there is right
   */
  public boolean isProtocolError() {
    return origin == Origin.PROTOCOL;
  }

  /**
   * The code, the reason and the message.
   *
   * @return for logs
   */
  @Override
  public String toString() {
    String why = reason.isEmpty() ? "" : " (" + reason + ")";
    return getClass().getName() + ": " + code + why + ": " + getMessage();
  }

  /**
   * Whether the same may succeed later, or elsewhere: the server was lost or is not ready, or it
   * has no room and says when to come again.
   */
  boolean isWorthARetry() {
    if (origin != Origin.SERVER || neverAgain) {
      return false;
    }
    return code == Status.Code.UNAVAILABLE
        || code == Status.Code.RESOURCE_EXHAUSTED && retryAfter != null;
  }

  /** Whether the server lacks the request's adapter, which another one may have. */
  boolean lacksAdapter() {
    return reason.equals(REASON_ADAPTER_NOT_LOADED);
  }

  /**
   * Whether a stream that ended with this was lost, whatever gRPC calls that: the one place that
   * says so. What a server itself says has a reason.
   */
  boolean isLoss() {
    return origin == Origin.SERVER
        && switch (code) {
          case UNAVAILABLE, CANCELLED -> true;
          case INTERNAL, UNKNOWN -> reason.isEmpty(); // of most broken connections and proxies
          case RESOURCE_EXHAUSTED, PERMISSION_DENIED -> // of two of RST_STREAM's codes
              reason.isEmpty() && getMessage().contains("RST_STREAM");
          default -> false;
        };
  }

  // ---- how they are made ------------------------------------------------------------------------

  static HeadraceException of(Status.Code code, String message) {
    return of(code, message, Origin.SERVER);
  }

  static HeadraceException of(Status.Code code, String message, Origin origin) {
    return new HeadraceException(
        code,
        message,
        "",
        Map.of(),
        List.of(),
        Optional.empty(),
        false,
        origin,
        "",
        Optional.empty(),
        null);
  }

  static HeadraceException unavailable(String message) {
    return of(Status.Code.UNAVAILABLE, message);
  }

  static HeadraceException closed(String what) {
    return of(Status.Code.UNAVAILABLE, what + " is closed", Origin.CLOSED);
  }

  static HeadraceException invalid(String field, String description) {
    return new HeadraceException(
        Status.Code.INVALID_ARGUMENT,
        field + ": " + description,
        "",
        Map.of(),
        List.of(new FieldViolation(field, description)),
        Optional.empty(),
        false,
        Origin.CALLER,
        "",
        Optional.empty(),
        null);
  }

  static HeadraceException moved(String id) {
    return new HeadraceException(
        Status.Code.ABORTED,
        "the results of request " + id + " moved to a stream that attached to it",
        REASON_MOVED,
        Map.of(),
        List.of(),
        Optional.empty(),
        false,
        Origin.SERVER,
        id,
        Optional.empty(),
        null);
  }

  /** Reads a status and its details. What cannot be read is passed over. */
  static HeadraceException of(com.google.rpc.Status told, String requestId) {
    return read(told, requestId, Optional.empty(), false, Origin.SERVER, null);
  }

  private static HeadraceException read(
      com.google.rpc.Status told,
      String requestId,
      Optional<Duration> advised,
      boolean neverAgain,
      Origin origin,
      Throwable cause) {
    Status.Code code = codeOf(told.getCode());
    String reason = "";
    Map<String, String> metadata = Map.of();
    List<FieldViolation> fields = new ArrayList<>();
    Optional<Duration> retryAfter = Optional.empty();
    for (Any packed : told.getDetailsList()) {
      try {
        if (packed.is(ErrorInfo.class)) {
          ErrorInfo info = packed.unpack(ErrorInfo.class);
          reason = info.getReason();
          metadata = Map.copyOf(info.getMetadataMap());
        } else if (packed.is(BadRequest.class)) {
          for (BadRequest.FieldViolation one :
              packed.unpack(BadRequest.class).getFieldViolationsList()) {
            fields.add(new FieldViolation(one.getField(), one.getDescription()));
          }
        } else if (packed.is(RetryInfo.class)) {
          retryAfter = Optional.of(Durations.from(packed.unpack(RetryInfo.class).getRetryDelay()));
        }
      } catch (InvalidProtocolBufferException | ArithmeticException spoiled) {
        continue; // not worth another error
      }
    }
    if (advised.isPresent()
        && (retryAfter.isEmpty() || retryAfter.get().compareTo(advised.get()) < 0)) {
      retryAfter = advised;
    }
    String message = told.getMessage().isEmpty() ? code.name() : told.getMessage();
    return new HeadraceException(
        code,
        message,
        reason,
        metadata,
        List.copyOf(fields),
        retryAfter,
        neverAgain,
        origin,
        requestId,
        Optional.empty(),
        cause);
  }

  private static Status.Code codeOf(int told) {
    return told >= 0 && told < Status.Code.values().length
        ? Status.fromCodeValue(told).getCode()
        : Status.Code.UNKNOWN;
  }

  /**
   * The error of an RPC. Where the caller's own deadline or cancel ended it, that is its origin.
   */
  static HeadraceException ofCall(
      Status status, Metadata trailers, String target, String requestId, boolean callerEnded) {
    com.google.rpc.Status told = null;
    Optional<Duration> advised = Optional.empty();
    boolean neverAgain = false;
    if (trailers != null) {
      byte[] details = trailers.get(DETAILS);
      if (details != null) {
        try {
          told = com.google.rpc.Status.parseFrom(details);
        } catch (InvalidProtocolBufferException spoiled) {
          told = null; // the status itself is told
        }
      }
      String pushback = trailers.get(PUSHBACK);
      if (pushback != null) {
        long millis = millisOf(pushback);
        neverAgain = millis < 0;
        advised = neverAgain ? Optional.empty() : Optional.of(Duration.ofMillis(millis));
      }
    }
    if (told == null || told.getCode() != status.getCode().value()) {
      told =
          com.google.rpc.Status.newBuilder()
              .setCode(status.getCode().value())
              .setMessage(wordsOf(status))
              .build();
    }
    Origin origin = Origin.SERVER;
    if (callerEnded
        && (status.getCode() == Status.Code.CANCELLED
            || status.getCode() == Status.Code.DEADLINE_EXCEEDED)) {
      origin = Origin.CALLER;
    }
    HeadraceException made = read(told, requestId, advised, neverAgain, origin, status.getCause());
    if (made.code == Status.Code.UNAVAILABLE && made.reason.isEmpty()) {
      return made.withMessage(
          "cannot reach a Headrace server at " + target + ": " + made.getMessage());
    }
    return made;
  }

  private static long millisOf(String pushback) {
    try {
      return Integer.parseInt(pushback);
    } catch (NumberFormatException noNumber) {
      return -1; // as gRPC has it
    }
  }

  /** gRPC's message, with what it says of the cause: "io exception" alone helps nobody. */
  private static String wordsOf(Status status) {
    String words = status.getDescription() == null ? "" : status.getDescription();
    Throwable cause = status.getCause();
    if (cause != null && cause.getMessage() != null && !words.contains(cause.getMessage())) {
      return words.isEmpty() ? cause.getMessage() : words + ": " + cause.getMessage();
    }
    return words;
  }

  private HeadraceException with(
      Status.Code code,
      String message,
      String requestId,
      Optional<Result> partial,
      Throwable cause) {
    HeadraceException made =
        new HeadraceException(
            code,
            message,
            reason,
            metadata,
            fields(),
            retryAfter(),
            neverAgain,
            origin,
            requestId,
            partial,
            cause);
    made.setStackTrace(getStackTrace());
    return made;
  }

  HeadraceException withMessage(String message) {
    return with(code, message, requestId, partial(), getCause());
  }

  /** The error for one of several requests that it ended. */
  HeadraceException forRequest(String requestId) {
    return with(code, getMessage(), requestId, Optional.empty(), getCause());
  }

  HeadraceException withPartial(String requestId, Optional<Result> partial) {
    return with(code, getMessage(), requestId, partial, getCause());
  }

  /** A stream's loss as the policy tells it: UNAVAILABLE, whatever gRPC called it. */
  HeadraceException asLoss(String what) {
    if (code == Status.Code.UNAVAILABLE) {
      return this;
    }
    return with(
        Status.Code.UNAVAILABLE,
        what + " was lost: " + getMessage(),
        requestId,
        partial(),
        getCause());
  }

  /** The same error for the thread that waited for it: its stack is where it was asked for. */
  HeadraceException thrownHere() {
    HeadraceException made = with(code, getMessage(), requestId, partial(), this);
    made.fillInStackTrace();
    return made;
  }
}
