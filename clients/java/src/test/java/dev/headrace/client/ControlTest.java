package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.headrace.v1.Adapter;
import dev.headrace.v1.ControlServiceGrpc;
import dev.headrace.v1.ListAdaptersRequest;
import dev.headrace.v1.ListAdaptersResponse;
import dev.headrace.v1.LoadAdapterRequest;
import dev.headrace.v1.LoadAdapterResponse;
import dev.headrace.v1.ModelServiceGrpc;
import dev.headrace.v1.UnloadAdapterRequest;
import dev.headrace.v1.UnloadAdapterResponse;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CopyOnWriteArrayList;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Which messages operators' calls send, and what they do not try again. */
@Timeout(60)
class ControlTest {
  private final List<Object> seen = new CopyOnWriteArrayList<>();
  private Server server;
  private HeadraceClient client;

  private final class Operated extends ControlServiceGrpc.ControlServiceImplBase {
    @Override
    public void loadAdapter(LoadAdapterRequest request, StreamObserver<LoadAdapterResponse> to) {
      seen.add(request);
      if (request.getSource().equals("gone")) {
        to.onError(Status.UNAVAILABLE.asException());
        return;
      }
      Adapter adapter = Adapter.newBuilder().setName(request.getName()).build();
      to.onNext(LoadAdapterResponse.newBuilder().setAdapter(adapter).addEvicted("old").build());
      to.onCompleted();
    }

    @Override
    public void unloadAdapter(
        UnloadAdapterRequest request, StreamObserver<UnloadAdapterResponse> to) {
      seen.add(request);
      to.onNext(UnloadAdapterResponse.newBuilder().setLiveRequests(3).build());
      to.onCompleted();
    }
  }

  /** Two pages of one adapter each. */
  private static final class Listing extends ModelServiceGrpc.ModelServiceImplBase {
    @Override
    public void listAdapters(ListAdaptersRequest request, StreamObserver<ListAdaptersResponse> to) {
      boolean isFirst = request.getPageToken().isEmpty();
      to.onNext(
          ListAdaptersResponse.newBuilder()
              .addAdapters(Adapter.newBuilder().setName(isFirst ? "a" : "b"))
              .setNextPageToken(isFirst ? "more" : "")
              .build());
      to.onCompleted();
    }
  }

  @BeforeEach
  void start() throws Exception {
    server =
        Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
            .addService(new Operated())
            .addService(new Listing())
            .build()
            .start();
    client = HeadraceClient.connect("localhost:" + server.getPort());
  }

  @AfterEach
  void stop() {
    client.close();
    server.shutdownNow();
  }

  @Test
  void anAdapterIsLoaded() {
    Control.LoadOptions options = Control.LoadOptions.DEFAULTS.withPinned(true).withReplace(true);

    LoadAdapterResponse told = client.control().loadAdapter("a", "a/v2", options).join();

    assertEquals("a", told.getAdapter().getName());
    assertEquals(List.of("old"), told.getEvictedList());
    assertEquals(
        LoadAdapterRequest.newBuilder()
            .setName("a")
            .setSource("a/v2")
            .setPinned(true)
            .setReplace(true)
            .build(),
        seen.get(0));
  }

  @Test
  void aLoadIsNotTriedAgain() {
    CompletionException thrown =
        assertThrows(
            CompletionException.class,
            () -> client.control().loadAdapter("a", "gone", Control.LoadOptions.DEFAULTS).join());

    assertEquals(Status.Code.UNAVAILABLE, ((HeadraceException) thrown.getCause()).code());
    assertEquals(1, seen.size());
  }

  @Test
  void noTimeoutIsNotOneOfZero() {
    Control control = client.control();

    assertEquals(3, control.unloadAdapter("a", Optional.empty()).join());
    assertEquals(3, control.unloadAdapter("a", Optional.of(Duration.ZERO)).join());

    assertFalse(((UnloadAdapterRequest) seen.get(0)).hasTimeout());
    assertTrue(((UnloadAdapterRequest) seen.get(1)).hasTimeout());
  }

  @Test
  void allPagesAreListed() {
    assertEquals(
        List.of("a", "b"), client.adapters().join().stream().map(Adapter::getName).toList());
  }

  @Test
  void controlIsOfOneServer() {
    try (HeadraceClient many = HeadraceClient.connect("a:1", "b:1")) {
      assertEquals(
          "target", assertThrows(HeadraceException.class, many::control).fields().get(0).field());
    }
  }
}
