package dev.headrace.client;

import dev.headrace.v1.GetResultResponse;
import io.grpc.Context;
import java.util.List;
import java.util.Map;

/** Reads a request that runs without a stream, by repeated GetResult calls. */
final class PolledSource implements GenerationStream.Source {
  private final HeadraceClient client;
  private final String id;
  private final Context.CancellableContext context;
  private final Map<String, String> trace = TraceContext.current();
  private GenerationStream to;
  private volatile boolean done;

  PolledSource(HeadraceClient client, String id, Context.CancellableContext context) {
    this.client = client;
    this.id = id;
    this.context = context;
  }

  @Override
  public void start(GenerationStream stream) {
    to = stream;
    ask();
  }

  @Override
  public void ask() {
    if (done) {
      return; // its end is about to be told
    }
    client.byId().read(context, id, to.nextSeq(), false, trace).whenComplete(this::answered);
  }

  private void answered(GetResultResponse answer, Throwable failed) {
    if (failed != null) {
      to.ended(Futures.errorOf(failed));
      return;
    }
    to.setInstance(answer.getInstanceId());
    if (answer.getEventsCount() == 0 && !answer.getDone()) {
      ask();
      return;
    }
    done = answer.getDone();
    to.arrived(answer.getEventsList());
    if (done) {
      to.ended(null);
    }
  }

  @Override
  public void finish(boolean inOrder) {
    context.cancel(null);
  }

  @Override
  public void cancel(String requestId) {
    client.cancel(List.of(requestId));
  }
}
