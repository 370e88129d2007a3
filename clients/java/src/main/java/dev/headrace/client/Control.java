package dev.headrace.client;

import dev.headrace.v1.ControlServiceGrpc;
import dev.headrace.v1.LoadAdapterRequest;
import dev.headrace.v1.LoadAdapterResponse;
import dev.headrace.v1.UnloadAdapterRequest;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;

/**
 * What operators do at a client's one server: they say which adapters requests may name. The calls
 * are not tried again.
 */
public final class Control {
  private final HeadraceClient client;

  Control(HeadraceClient client) {
    this.client = client;
  }

  /**
   * How an adapter is loaded.
   *
   * @param pinned whether it stays when others need the memory
   * @param replace whether it may take the place of a loaded adapter with this name. Requests that
   *     were accepted before go on with what they began with
   */
  public record LoadOptions(boolean pinned, boolean replace) {
    /** It is not pinned, and takes no other's place. */
    public static final LoadOptions DEFAULTS = new LoadOptions(false, false);

    /**
     * These options with a pin, or without.
     *
     * @param pinned whether it stays when others need the memory
     * @return other options
     */
    public LoadOptions withPinned(boolean pinned) {
      return new LoadOptions(pinned, replace);
    }

    /**
     * These options with a replacement, or without.
     *
     * @param replace whether it may take the place of a loaded adapter with this name
     * @return other options
     */
    public LoadOptions withReplace(boolean replace) {
      return new LoadOptions(pinned, replace);
    }
  }

  /**
   * Loads an adapter.
   *
   * @param name what requests will call it
   * @param source the name of its directory below the server's {@code --adapter-root}
   * @param options whether it is pinned, and may replace another
   * @return when requests may name it: the adapter, and the names of those that had to go because
   *     it needed the memory. It fails with ALREADY_EXISTS if the name is taken,
   *     FAILED_PRECONDITION if the adapter cannot be served, whose message gives the reason, and
   *     RESOURCE_EXHAUSTED if there is no room for it
   */
  public CompletableFuture<LoadAdapterResponse> loadAdapter(
      String name, String source, LoadOptions options) {
    LoadAdapterRequest request =
        LoadAdapterRequest.newBuilder()
            .setName(Texts.sendable("name", name))
            .setSource(Texts.sendable("source", source))
            .setPinned(options.pinned())
            .setReplace(options.replace())
            .build();
    return client.ask(ControlServiceGrpc.getLoadAdapterMethod(), request, 0, Function.identity());
  }

  /**
   * Unloads an adapter: requests can no longer name it.
   *
   * @param name the adapter's name
   * @param timeout how long requests that have it may go on, before they are cancelled; empty: to
   *     their end
   * @return how many live requests have it. It fails with NOT_FOUND if no adapter has the name
   */
  public CompletableFuture<Long> unloadAdapter(String name, Optional<Duration> timeout) {
    UnloadAdapterRequest.Builder request =
        UnloadAdapterRequest.newBuilder().setName(Texts.sendable("name", name));
    timeout.ifPresent(limit -> request.setTimeout(Durations.to(limit)));
    return client.ask(
        ControlServiceGrpc.getUnloadAdapterMethod(),
        request.build(),
        0,
        answer -> answer.getLiveRequests());
  }
}
