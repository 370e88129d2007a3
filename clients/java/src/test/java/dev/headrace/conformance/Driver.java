package dev.headrace.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import dev.headrace.client.Batch;
import dev.headrace.client.BatchOptions;
import dev.headrace.client.Chunk;
import dev.headrace.client.Control;
import dev.headrace.client.Generation;
import dev.headrace.client.GenerationStream;
import dev.headrace.client.Handle;
import dev.headrace.client.HeadraceClient;
import dev.headrace.client.Request;
import dev.headrace.client.Result;
import dev.headrace.client.Session;
import dev.headrace.client.SessionOptions;
import io.opentelemetry.api.trace.propagation.W3CTraceContextPropagator;
import io.opentelemetry.context.Context;
import io.opentelemetry.context.Scope;
import io.opentelemetry.context.propagation.TextMapGetter;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * The driver of this library for the suite in tests/conformance: it reads commands from the
 * standard input, a JSON object a line, carries them out with the library, and writes an answer for
 * each. It decides nothing and compares nothing; tests/conformance/README.md has the protocol.
 */
public final class Driver {
  /** Commands that wait run beside the others; the rest take effect in the order of their lines. */
  private static final Set<String> WAITS =
      Set.of(
          "generate",
          "read",
          "result",
          "leave",
          "close_session",
          "close_client",
          "batch",
          "add_request",
          "get_result",
          "cancel_ids",
          "load_adapter",
          "unload_adapter",
          "adapters");

  private static final Set<String> MEMBERS =
      Set.of(
          "id",
          "op",
          "client",
          "session",
          "handle",
          "of",
          "targets",
          "token",
          "ca",
          "server_name",
          "metadata",
          "retries",
          "max_message_bytes",
          "request",
          "requests",
          "max_in_flight",
          "ordered",
          "traceparent",
          "deadline_ms",
          "lease_ms",
          "initial_credit",
          "room_timeout_ms",
          "request_id",
          "request_ids",
          "from_seq",
          "n",
          "chunks",
          "timeout_ms",
          "cancel",
          "name",
          "source",
          "pinned",
          "replace");

  private static final Gson JSON =
      new GsonBuilder().serializeNulls().disableHtmlEscaping().create();

  private final PrintStream out =
      new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
  private final Map<String, HeadraceClient> clients = new ConcurrentHashMap<>();
  private final Map<String, Session> sessions = new ConcurrentHashMap<>();
  private final Map<String, Generation> handles = new ConcurrentHashMap<>();
  private final Map<Long, Waiting> waiting = new HashMap<>(); // guarded by itself
  private final ExecutorService threads = Executors.newCachedThreadPool();

  /** A command that waits: its thread, once it has one. */
  private static final class Waiting {
    private Thread thread;
    private boolean abandoned;
  }

  private static final class Unsupported extends RuntimeException {
    private static final long serialVersionUID = 1L;

    Unsupported(String why) {
      super(why);
    }
  }

  /**
   * Runs until the input ends.
   *
   * @param arguments none
   * @throws Exception if the input cannot be read
   */
  public static void main(String[] arguments) throws Exception {
    new Driver().run();
  }

  private void run() throws IOException, InterruptedException {
    JsonObject ready = new JsonObject();
    ready.addProperty("language", "java");
    ready.addProperty("protocol", 1);
    JsonObject first = new JsonObject();
    first.add("ready", ready);
    tell(first);
    BufferedReader lines =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = readLine(lines); line != null; line = readLine(lines)) {
      take(JsonParser.parseString(line).getAsJsonObject());
    }
    clients.values().forEach(HeadraceClient::close);
    threads.shutdown();
    threads.awaitTermination(4, TimeUnit.SECONDS);
  }

  /** Lines end with a line feed alone. */
  private static String readLine(BufferedReader from) throws IOException {
    StringBuilder line = new StringBuilder();
    for (int one = from.read(); one != '\n'; one = from.read()) {
      if (one < 0) {
        return null;
      }
      line.append((char) one);
    }
    return line.toString();
  }

  private void tell(JsonObject answer) {
    synchronized (out) {
      out.print(JSON.toJson(answer) + "\n");
      out.flush();
    }
  }

  private void take(JsonObject command) {
    String op = command.get("op").getAsString();
    boolean isCall =
        op.equals("cancel")
            && handles.get(Forms.text(command, "handle")) instanceof GenerationStream;
    if (WAITS.contains(op) || isCall) {
      long id = command.get("id").getAsLong();
      Waiting known = new Waiting();
      synchronized (waiting) {
        waiting.put(id, known);
      }
      threads.execute(
          () -> {
            synchronized (waiting) {
              known.thread = Thread.currentThread();
              if (known.abandoned) {
                known.thread.interrupt();
              }
            }
            answer(command);
          });
    } else {
      answer(command);
    }
  }

  private void answer(JsonObject command) {
    JsonObject told = new JsonObject();
    long id = command.get("id").getAsLong();
    told.addProperty("id", id);
    JsonArray chunks = new JsonArray();
    try (Scope traced = trace(command)) {
      command.keySet().stream()
          .filter(member -> !MEMBERS.contains(member))
          .findFirst()
          .ifPresent(
              unknown -> {
                throw new Unsupported("no member " + unknown);
              });
      told.add("ok", act(command, chunks));
    } catch (Unsupported refused) {
      told.addProperty("unsupported", refused.getMessage());
    } catch (RuntimeException failed) {
      told.add("error", Forms.error(failed));
      if (command.get("op").getAsString().equals("read")) {
        told.add("chunks", chunks);
      }
    }
    synchronized (waiting) {
      waiting.remove(id);
    }
    Thread.interrupted(); // the next command of this thread is another one
    tell(told);
  }

  private static final TextMapGetter<JsonObject> GETTER =
      new TextMapGetter<>() {
        @Override
        public Iterable<String> keys(JsonObject from) {
          return from.keySet();
        }

        @Override
        public String get(JsonObject from, String key) {
          return from != null && Forms.has(from, key) ? Forms.text(from, key) : null;
        }
      };

  private static Scope trace(JsonObject command) {
    return W3CTraceContextPropagator.getInstance()
        .extract(Context.root(), command, GETTER)
        .makeCurrent();
  }

  private JsonObject act(JsonObject c, JsonArray chunks) {
    Session session = sessions.get(Forms.text(c, "session"));
    Generation handle = handles.get(Forms.text(c, "handle"));
    switch (c.get("op").getAsString()) {
      case "abandon":
        synchronized (waiting) {
          Waiting given = waiting.get(c.get("of").getAsLong());
          if (given != null) {
            given.abandoned = true;
            if (given.thread != null) {
              given.thread.interrupt();
            }
          }
        }
        return new JsonObject();
      case "submit":
        return begun(c, session.submit(Forms.request(c.getAsJsonObject("request"))));
      case "attach":
        String id = Forms.text(c, "request_id");
        long from = Forms.has(c, "from_seq") ? c.get("from_seq").getAsLong() : 1;
        int n = Forms.has(c, "n") ? c.get("n").getAsInt() : 0;
        return begun(c, from > 1 ? session.attach(id, from, n) : session.attach(id));
      case "resume":
        return begun(c, session.resume((Handle) handles.get(Forms.text(c, "of"))));
      case "read":
        return read(c, handle, chunks);
      case "result":
        return Forms.result(
            Forms.has(c, "timeout_ms")
                ? handle.result(Forms.millis(c, "timeout_ms"))
                : handle.result());
      case "cancel":
        handle.cancel();
        return new JsonObject();
      case "leave":
        ((GenerationStream) handle).close();
        return new JsonObject();
      case "session":
        JsonObject told = new JsonObject();
        told.addProperty("live", session.live());
        session
            .lease()
            .ifPresentOrElse(
                lease -> told.addProperty("lease_ms", lease.toMillis()),
                () -> told.add("lease_ms", JsonNull.INSTANCE));
        return told;
      case "close_session":
        if (Forms.flag(c, "cancel")) {
          session.close();
        } else {
          session.finish();
        }
        return new JsonObject();
      default:
        return ask(c);
    }
  }

  /** Does what a client is asked for. */
  private JsonObject ask(JsonObject c) {
    HeadraceClient client = clients.get(Forms.text(c, "client"));
    JsonObject told = new JsonObject();
    switch (c.get("op").getAsString()) {
      case "connect":
        clients.put(Forms.text(c, "client"), connect(c));
        return told;
      case "close_client":
        client.close();
        return told;
      case "generate":
        return Forms.result(client.generate(Forms.request(c.getAsJsonObject("request"))));
      case "stream":
        Request request = Forms.request(c.getAsJsonObject("request"));
        handles.put(
            Forms.text(c, "handle"),
            Forms.has(c, "deadline_ms")
                ? client.stream(request, Forms.millis(c, "deadline_ms"))
                : client.stream(request));
        return told;
      case "open_session":
        sessions.put(Forms.text(c, "session"), client.session(sessionOptions(c)));
        return told;
      case "batch":
        told.add("outcomes", batch(client, c));
        return told;
      case "add_request":
        told.addProperty(
            "request_id", client.add(Forms.request(c.getAsJsonObject("request"))).requestId());
        return told;
      case "get_result":
        String id = Forms.text(c, "request_id");
        Result result =
            Forms.has(c, "timeout_ms")
                ? client.result(id, Forms.millis(c, "timeout_ms"))
                : client.result(id);
        return Forms.result(result);
      case "cancel_ids":
        JsonObject statuses = new JsonObject();
        client
            .cancel(Forms.texts(c, "request_ids"))
            .forEach(
                (key, status) -> statuses.addProperty(key, status.name().toLowerCase(Locale.ROOT)));
        told.add("statuses", statuses);
        return told;
      default:
        return askOfAdapters(client, c);
    }
  }

  /** Waits for a future of the library's, whose error is told as its own. */
  private static <T> T await(CompletableFuture<T> future) {
    try {
      return future.join();
    } catch (CompletionException failed) {
      throw (RuntimeException) failed.getCause();
    }
  }

  private static JsonObject askOfAdapters(HeadraceClient client, JsonObject c) {
    JsonObject told = new JsonObject();
    String name = Forms.text(c, "name");
    switch (c.get("op").getAsString()) {
      case "load_adapter":
        Control.LoadOptions options =
            new Control.LoadOptions(Forms.flag(c, "pinned"), Forms.flag(c, "replace"));
        return Forms.loaded(
            await(client.control().loadAdapter(name, Forms.text(c, "source"), options)));
      case "unload_adapter":
        Optional<Duration> timeout =
            Forms.has(c, "timeout_ms")
                ? Optional.of(Forms.millis(c, "timeout_ms"))
                : Optional.empty();
        told.addProperty("live", await(client.control().unloadAdapter(name, timeout)));
        return told;
      case "adapters":
        JsonArray adapters = new JsonArray();
        await(client.adapters()).forEach(one -> adapters.add(Forms.adapter(one)));
        told.add("adapters", adapters);
        return told;
      default:
        throw new Unsupported("no such command");
    }
  }

  private static HeadraceClient connect(JsonObject c) {
    HeadraceClient.Builder made =
        HeadraceClient.builder(Forms.texts(c, "targets").toArray(String[]::new));
    if (Forms.has(c, "token")) {
      made.token(Forms.text(c, "token"));
    }
    if (Forms.has(c, "ca")) {
      made.caFile(Path.of(Forms.text(c, "ca")));
    }
    if (Forms.has(c, "server_name")) {
      made.serverName(Forms.text(c, "server_name"));
    }
    if (Forms.has(c, "metadata")) {
      c.getAsJsonObject("metadata")
          .asMap()
          .forEach((key, value) -> made.metadata(key, value.getAsString()));
    }
    if (Forms.has(c, "retries")) {
      made.retries(c.get("retries").getAsInt());
    }
    if (Forms.has(c, "max_message_bytes")) {
      made.maxMessageBytes(c.get("max_message_bytes").getAsInt());
    }
    return made.build();
  }

  private static SessionOptions sessionOptions(JsonObject c) {
    SessionOptions options = SessionOptions.DEFAULTS.withLease(Forms.millis(c, "lease_ms"));
    if (Forms.has(c, "initial_credit")) {
      options = options.withInitialCredit(c.get("initial_credit").getAsInt());
    }
    if (Forms.has(c, "room_timeout_ms")) {
      options = options.withRoomTimeout(Forms.millis(c, "room_timeout_ms"));
    }
    return options;
  }

  private static JsonArray batch(HeadraceClient client, JsonObject c) {
    Iterator<Request> requests =
        Forms.objects(c, "requests").stream().map(Forms::request).iterator();
    BatchOptions options =
        new BatchOptions(
            Forms.has(c, "max_in_flight")
                ? c.get("max_in_flight").getAsInt()
                : BatchOptions.DEFAULTS.maxInFlight(),
            Forms.flag(c, "ordered"));
    JsonArray told = new JsonArray();
    try (Batch batch = client.batch(requests, options)) {
      batch.forEach(outcome -> told.add(Forms.outcome(outcome)));
    }
    return told;
  }

  private JsonObject begun(JsonObject c, Handle made) {
    handles.put(Forms.text(c, "handle"), made);
    JsonObject told = new JsonObject();
    told.addProperty("request_id", made.requestId());
    return told;
  }

  private static JsonObject read(JsonObject c, Generation handle, JsonArray chunks) {
    int most = Forms.has(c, "chunks") ? c.get("chunks").getAsInt() : Integer.MAX_VALUE;
    boolean end = false;
    Iterator<Chunk> from = handle.iterator();
    while (!end && chunks.size() < most) {
      if (from.hasNext()) {
        chunks.add(Forms.chunk(from.next()));
      } else {
        end = true;
      }
    }
    JsonObject told = new JsonObject();
    told.add("chunks", chunks);
    told.addProperty("end", end);
    return told;
  }
}
