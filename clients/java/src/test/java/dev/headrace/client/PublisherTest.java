package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Output at a subscriber's demand, and futures. */
@Timeout(60)
class PublisherTest {
  private Scripted server;
  private HeadraceClient client;

  @BeforeEach
  void start() throws Exception {
    server = new Scripted();
    client = server.client();
    server.reply(
        Scripted.text("a"),
        Scripted.text("b"),
        Scripted.text("c"),
        Scripted.finished(dev.headrace.v1.FinishReason.FINISH_REASON_STOP));
  }

  @AfterEach
  void stop() {
    client.close();
    server.close();
  }

  private GenerationStream stream() {
    return client.stream(Request.text("x").build());
  }

  /** Notes what it is told, in order. */
  private static final class Noting implements Flow.Subscriber<Chunk> {
    final BlockingQueue<Object> told = new LinkedBlockingQueue<>();
    Flow.Subscription subscription;

    Noting(Flow.Publisher<Chunk> to) {
      to.subscribe(this);
    }

    @Override
    public void onSubscribe(Flow.Subscription made) {
      subscription = made;
    }

    @Override
    public void onNext(Chunk chunk) {
      told.add(chunk.text());
    }

    @Override
    public void onError(Throwable failed) {
      told.add(failed);
    }

    @Override
    public void onComplete() {
      told.add("the end");
    }
  }

  @Test
  void noMoreIsGivenThanIsAskedFor() throws Exception {
    GenerationStream stream = stream();
    Noting noting = new Noting(stream.publisher());

    noting.subscription.request(2);
    assertEquals("a", noting.told.take());
    assertEquals("b", noting.told.take());
    assertEquals("abc", stream.resultAsync().get().text()); // all has come, and waits
    assertTrue(noting.told.isEmpty());

    noting.subscription.request(1);
    assertEquals("c", noting.told.take());
    assertEquals("the end", noting.told.take());
  }

  @Test
  void aCancelClosesTheStream() throws Exception {
    GenerationStream stream = stream();
    Noting noting = new Noting(stream.publisher());
    noting.subscription.request(1);
    assertEquals("a", noting.told.take());

    noting.subscription.cancel();

    assertEquals(FinishReason.UNKNOWN, stream.result().finishReason());
    assertTrue(noting.told.isEmpty());
  }

  @Test
  void thereIsOneSubscriber() throws Exception {
    GenerationStream stream = stream();
    new Noting(stream.publisher());

    assertInstanceOf(IllegalStateException.class, new Noting(stream.publisher()).told.take());
    assertEquals("abc", stream.result().text());
  }

  @Test
  void aLoopGoesOnWhereItWasLeft() {
    GenerationStream stream = stream();
    StringBuilder told = new StringBuilder();

    assertTrue(stream.iterator().hasNext());
    told.append(stream.iterator().next().text());
    stream.forEach(chunk -> told.append(chunk.text()));

    assertEquals("abc", told.toString());
  }

  @Test
  void aFutureFailsWithTheErrorItself() {
    CompletableFuture<Result> future = client.generateAsync(Request.text("x").build());

    ExecutionException thrown = assertThrows(ExecutionException.class, future::get);

    assertInstanceOf(HeadraceException.class, thrown.getCause()); // the server has no such call
  }
}
