package dev.headrace.client;

import dev.headrace.v1.GenerateStreamRequest;
import dev.headrace.v1.GenerateStreamResponse;
import dev.headrace.v1.GenerationServiceGrpc;
import dev.headrace.v1.ResultEvent;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.List;
import java.util.Map;

/**
 * Reads a GenerateStream. As long as nothing was delivered, a stream to one of several servers that
 * fails is begun again elsewhere.
 */
final class RpcSource implements GenerationStream.Source {
  private final HeadraceClient client;
  private final GenerateStreamRequest request;
  private final String id;
  private final Attempts tries;
  private final Context.CancellableContext context;
  private final Map<String, String> trace = TraceContext.current();
  private GenerationStream to;
  private Call current; // guarded by this
  private boolean finished;

  RpcSource(
      HeadraceClient client,
      GenerateStreamRequest request,
      Attempts tries,
      Context.CancellableContext context) {
    this.client = client;
    this.request = request;
    this.id = request.getSpec().getRequestId();
    this.tries = tries;
    this.context = context;
  }

  @Override
  public void start(GenerationStream stream) {
    to = stream;
    attempt();
  }

  private void attempt() {
    tries
        .next(context)
        .whenComplete(
            (at, nobody) -> {
              if (nobody != null) {
                to.ended(Futures.errorOf(nobody));
              } else {
                new Call(at).begin();
              }
            });
  }

  @Override
  public void ask() {
    Call asked;
    synchronized (this) {
      asked = current;
    }
    if (asked != null) {
      asked.call.request(1);
    }
  }

  @Override
  public void finish(boolean inOrder) {
    Call last;
    synchronized (this) {
      finished = true;
      last = current;
    }
    if (inOrder && last != null) {
      last.call.request(1); // the call ends normally: the server does not count it as lost
    } else {
      context.cancel(null);
    }
  }

  @Override
  public void cancel(String requestId) {
    client.cancel(List.of(requestId));
  }

  /** One try at one server. */
  private final class Call extends ClientCall.Listener<GenerateStreamResponse> {
    private final Server at;
    private final ClientCall<GenerateStreamRequest, GenerateStreamResponse> call;
    private HeadraceException failure; // what its events told, before there was output

    Call(Server at) {
      this.at = at;
      call = Calls.open(at, GenerationServiceGrpc.getGenerateStreamMethod(), context, trace);
    }

    void begin() {
      synchronized (RpcSource.this) {
        current = this;
      }
      call.start(this, new Metadata());
      call.request(1);
      call.sendMessage(request);
      call.halfClose();
    }

    @Override
    public void onMessage(GenerateStreamResponse message) {
      if (failure != null) {
        return;
      }
      if (!message.getInstanceId().isEmpty()) {
        to.setInstance(message.getInstanceId());
        Pool pool = client.pool();
        pool.noteInstance(at, message.getInstanceId());
        pool.noteOwner(id, message.getInstanceId());
        pool.succeeded();
      }
      failure = client.pool().many ? failedUndelivered(message.getEventsList()) : null;
      if (failure == null) {
        to.arrived(message.getEventsList());
      } else {
        call.cancel("the server has failed", null);
      }
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      client.pool().over(at);
      boolean isFinished;
      synchronized (RpcSource.this) {
        current = null;
        isFinished = finished;
      }
      if (isFinished) {
        context.cancel(null);
        return;
      }
      HeadraceException error = failure;
      if (error == null && status.isOk()) {
        to.ended(HeadraceException.unavailable("the server ended the stream before the request"));
        return;
      }
      if (error == null) {
        error = Calls.errorOf(at, context, status, trailers, id);
      }
      if (error.isLoss()) {
        error = error.asLoss("the stream");
      }
      if (client.pool().isClosed()) {
        error = HeadraceException.closed("the client");
      }
      if (!client.pool().many || !to.mayRestart() || context.isCancelled()) {
        to.ended(error);
        return;
      }
      tries
          .failed(context, at, error)
          .whenComplete(
              (nothing, last) -> {
                if (last != null) {
                  to.ended(Futures.errorOf(last));
                } else {
                  to.restart();
                  attempt();
                }
              });
    }

    /** The failure that events tell, if it is one of the server's and there is no output yet. */
    private HeadraceException failedUndelivered(List<ResultEvent> events) {
      if (!to.mayRestart()) {
        return null;
      }
      for (ResultEvent event : events) {
        if (event.hasDelta()) {
          return null;
        }
        if (event.hasFailed()) {
          HeadraceException told = HeadraceException.of(event.getFailed().getStatus(), id);
          return told.code() == Status.Code.UNAVAILABLE ? told : null;
        }
      }
      return null;
    }
  }
}
