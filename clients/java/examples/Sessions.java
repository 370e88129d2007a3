import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import dev.headrace.client.Chunk;
import dev.headrace.client.FieldViolation;
import dev.headrace.client.Handle;
import dev.headrace.client.HeadraceClient;
import dev.headrace.client.HeadraceException;
import dev.headrace.client.Request;
import dev.headrace.client.Result;
import dev.headrace.client.Session;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Runs prompts on one session, and prints what comes back: each line begins with its request's
 * number.
 *
 * <pre>
 * java -cp 'target/classes:target/lib/*' examples/Sessions.java --target localhost:50051 'Once upon a time' 'The old mill'
 * </pre>
 *
 * The exit code is 1 if a request was refused or failed.
 */
final class Sessions {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
  private static final PrintStream ERR = new PrintStream(System.err, true, StandardCharsets.UTF_8);
  private static final Gson JSON = new GsonBuilder().disableHtmlEscaping().create();

  public static void main(String[] arguments) {
    List<String> prompts = new ArrayList<>(List.of(arguments));
    String target = option(prompts, "--target", "");
    int maxTokens = Integer.parseInt(option(prompts, "--max-tokens", "32"));
    AtomicInteger failures = new AtomicInteger();

    try (HeadraceClient client = HeadraceClient.connect(target);
        Session session = client.session()) {
      List<CompletableFuture<Void>> printed = new ArrayList<>();
      for (int i = 0; i < prompts.size(); i++) {
        int number = i + 1;
        Request request = Request.text(prompts.get(i)).temperature(0).maxTokens(maxTokens).build();
        Printer printer = new Printer(number, session.submit(request));
        printed.add(
            printer.done.exceptionally(
                failed -> {
                  failures.incrementAndGet();
                  tell(number, (HeadraceException) failed);
                  return null;
                }));
      }
      CompletableFuture.allOf(printed.toArray(CompletableFuture<?>[]::new)).join();
      session.finish();
    }
    if (failures.get() > 0) {
      ERR.println(failures + " of " + prompts.size() + " requests failed");
      System.exit(1);
    }
  }

  /** Prints one request's output as it comes. No thread waits for it. */
  private static final class Printer implements Flow.Subscriber<Chunk> {
    final CompletableFuture<Void> done = new CompletableFuture<>();
    private final int number;
    private final Handle handle;

    Printer(int number, Handle handle) {
      this.number = number;
      this.handle = handle;
      handle.publisher().subscribe(this);
    }

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      subscription.request(Long.MAX_VALUE);
    }

    @Override
    public void onNext(Chunk chunk) {
      if (!chunk.text().isEmpty()) {
        OUT.println("[" + number + "] " + JSON.toJson(chunk.text()));
      }
    }

    @Override
    public void onError(Throwable failed) {
      done.completeExceptionally(failed);
    }

    @Override
    public void onComplete() {
      Result result = handle.result();
      String reason = result.finishReason().name().toLowerCase(Locale.ROOT);
      OUT.println(
          "[" + number + "] " + reason + ", " + result.usage().completionTokens() + " tokens");
      done.complete(null);
    }
  }

  private static void tell(int number, HeadraceException failed) {
    ERR.println("[" + number + "] " + failed.code() + ": " + failed.getMessage());
    for (FieldViolation field : failed.fields()) {
      ERR.println("    " + field.field() + ": " + field.description());
    }
    failed.retryAfter().ifPresent(delay -> ERR.println("    try again after " + delay));
  }

  private static String option(List<String> words, String name, String without) {
    int at = words.indexOf(name);
    if (at < 0) {
      return without;
    }
    words.remove(at);
    return words.remove(at);
  }
}
