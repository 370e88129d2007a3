package dev.headrace.client;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/** Makes gRPC's calls: in a context of the caller's, and with the trace in which it called. */
final class Calls {
  private Calls() {}

  /** The trace context that a call's metadata has. */
  static final CallOptions.Key<Map<String, String>> TRACE =
      CallOptions.Key.createWithDefault("headrace-trace", Map.of());

  /** A call that the context's end cancels. It is not started. */
  static <Q, A> ClientCall<Q, A> open(
      Server at, MethodDescriptor<Q, A> method, Context context, Map<String, String> trace) {
    Context before = context.attach();
    try {
      return at.channel.newCall(method, CallOptions.DEFAULT.withOption(TRACE, trace));
    } finally {
      context.detach(before);
    }
  }

  /** Makes a unary call, once. It fails with an error of this package's. */
  static <Q, A> CompletableFuture<A> unary(
      Server at,
      MethodDescriptor<Q, A> method,
      Q request,
      Context context,
      Map<String, String> trace,
      String requestId) {
    CompletableFuture<A> answer = new CompletableFuture<>();
    ClientCall<Q, A> call = open(at, method, context, trace);
    call.start(
        new ClientCall.Listener<>() {
          private A message;

          @Override
          public void onMessage(A told) {
            message = told;
          }

          @Override
          public void onClose(Status status, Metadata trailers) {
            if (status.isOk() && message != null) {
              answer.complete(message);
            } else {
              Status told =
                  status.isOk() ? Status.INTERNAL.withDescription("no answer came") : status;
              answer.completeExceptionally(errorOf(at, context, told, trailers, requestId));
            }
          }
        },
        new Metadata());
    call.request(2); // more than one would be an error, which gRPC tells
    call.sendMessage(request);
    call.halfClose();
    return answer;
  }

  /** The error of a call at a server. */
  static HeadraceException errorOf(
      Server at, Context context, Status status, Metadata trailers, String requestId) {
    boolean wasLate =
        status.getCode() == Status.Code.DEADLINE_EXCEEDED && context.getDeadline() != null;
    return HeadraceException.ofCall(
        status, trailers, at.address.target(), requestId, context.isCancelled() || wasLate);
  }
}
