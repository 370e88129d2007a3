package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import java.util.List;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What a close ends, and that nothing is left of it. */
@Timeout(60)
class CloseTest {
  private static List<Thread> ours() {
    return Thread.getAllStackTraces().keySet().stream()
        .filter(thread -> thread.getName().startsWith("headrace-"))
        .toList();
  }

  @Test
  void noThreadIsLeft() throws Exception {
    Scripted server = new Scripted(); // it has no sessions, so requests of one fail
    HeadraceClient client = server.client();
    Session session = client.session();
    Future<Result> result = session.submit(Request.text("x").build()).resultAsync();
    assertThrows(ExecutionException.class, result::get);
    Batch batch =
        client.batch(
            Stream.generate(() -> Request.text("x").build()).iterator(), BatchOptions.DEFAULTS);
    assertTrue(batch.next().error().isPresent());
    assertTrue(!ours().isEmpty());

    batch.close();
    client.close();
    client.close();
    server.close();

    for (Thread thread : ours()) {
      thread.join();
    }
  }

  @Test
  void afterAClose() {
    HeadraceClient client = HeadraceClient.connect("unix:/nowhere");
    Session session = client.session();
    client.close();

    HeadraceException refused =
        assertThrows(HeadraceException.class, () -> client.generate(Request.text("x").build()));
    assertEquals(Status.Code.UNAVAILABLE, refused.code());
    assertTrue(refused.isClosed());
    assertTrue(assertThrows(HeadraceException.class, client::session).isClosed());
    assertTrue(
        assertThrows(HeadraceException.class, () -> session.submit(Request.text("x").build()))
            .isClosed());
  }
}
