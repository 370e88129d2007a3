package dev.headrace.client;

import dev.headrace.v1.Accepted;
import dev.headrace.v1.Delta;
import dev.headrace.v1.FinishReason;
import dev.headrace.v1.Finished;
import dev.headrace.v1.GenerateStreamRequest;
import dev.headrace.v1.GenerateStreamResponse;
import dev.headrace.v1.GenerationServiceGrpc;
import dev.headrace.v1.GenerationSpec;
import dev.headrace.v1.ResultEvent;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Server;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.util.ArrayDeque;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.CopyOnWriteArrayList;

/** A server whose streams give what a test says, one reply after the other. */
final class Scripted extends GenerationServiceGrpc.GenerationServiceImplBase
    implements AutoCloseable {
  final List<GenerationSpec> requests = new CopyOnWriteArrayList<>();
  private final Queue<List<ResultEvent.Builder>> replies = new ArrayDeque<>();
  private final Server server;

  Scripted() throws IOException {
    server =
        Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
            .addService(this)
            .build()
            .start();
  }

  HeadraceClient client() {
    return HeadraceClient.connect("localhost:" + server.getPort());
  }

  void reply(ResultEvent.Builder... events) {
    replies.add(List.of(events));
  }

  static ResultEvent.Builder text(String text) {
    return ResultEvent.newBuilder().setDelta(Delta.newBuilder().setText(text));
  }

  static ResultEvent.Builder finished(FinishReason reason) {
    return ResultEvent.newBuilder().setFinished(Finished.newBuilder().setReason(reason));
  }

  @Override
  public void generateStream(
      GenerateStreamRequest request, StreamObserver<GenerateStreamResponse> to) {
    requests.add(request.getSpec());
    long seq = 0;
    Accepted.Builder accepted =
        Accepted.newBuilder().setRequestId(request.getSpec().getRequestId()).setN(1);
    to.onNext(message(++seq, ResultEvent.newBuilder().setAccepted(accepted)));
    for (ResultEvent.Builder event : replies.remove()) {
      to.onNext(message(++seq, event));
    }
    to.onCompleted();
  }

  private static GenerateStreamResponse message(long seq, ResultEvent.Builder event) {
    return GenerateStreamResponse.newBuilder().addEvents(event.setSeq(seq)).build();
  }

  @Override
  public void close() {
    server.shutdownNow();
  }
}
