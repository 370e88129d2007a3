import com.google.gson.JsonParser;
import dev.headrace.client.HeadraceClient;
import dev.headrace.client.HeadraceException;
import dev.headrace.client.Message;
import dev.headrace.client.Request;
import dev.headrace.client.Tool;
import dev.headrace.client.ToolCall;
import dev.headrace.client.ToolChoice;
import dev.headrace.client.ToolRun;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * Asks a question that the model may answer with a tool, which is a method of this program.
 *
 * <pre>
 * java -cp 'target/classes:target/lib/*' examples/Tools.java --target localhost:50051 'How high is the Danube in Ulm?'
 * </pre>
 *
 * The replies' text is printed as it comes, the calls on the standard error. The exit code is 1 if
 * a request was refused or failed, or a reply was cut within a call.
 */
final class Tools {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
  private static final PrintStream ERR = new PrintStream(System.err, true, StandardCharsets.UTF_8);

  /** The tool as the chat template shows it to the model. */
  private static final Tool READ_GAUGE =
      new Tool(
          "read_gauge",
          "How high a river is.",
          """
          {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}""");

  /** The tool itself. What it throws is told to the model, which may try again. */
  private static String readGauge(ToolCall call) {
    String place =
        JsonParser.parseString(call.arguments()).getAsJsonObject().get("place").getAsString();
    String answer = place.getBytes(StandardCharsets.UTF_8).length + " m";
    ERR.println(call.name() + " " + call.arguments() + ": " + answer);
    return answer;
  }

  public static void main(String[] arguments) {
    List<String> words = new ArrayList<>(List.of(arguments));
    String target = option(words, "--target");
    String choice = option(words, "--tool-choice").toUpperCase(Locale.ROOT);
    Request.Builder request =
        Request.chat(Message.user(String.join(" ", words)))
            .tools(List.of(READ_GAUGE))
            .maxTokens(1024)
            .temperature(0);
    AtomicBoolean wrote = new AtomicBoolean(); // a reply's text is a line
    ToolRun.Function tool =
        call -> {
          endLine(wrote);
          return readGauge(call);
        };
    ToolRun.Options options =
        new ToolRun.Options(
            8,
            chunk -> {
              OUT.print(chunk.text());
              wrote.compareAndSet(false, !chunk.text().isEmpty());
            },
            conversation -> {});

    String problem = "";
    try (HeadraceClient client = HeadraceClient.connect(target)) {
      if (!choice.isEmpty()) {
        request.toolChoice(new ToolChoice(ToolChoice.Mode.valueOf(choice)));
      }
      ToolRun run = client.runTools(request.build(), Map.of(READ_GAUGE.name(), tool), options);
      endLine(wrote);
      if (run.end() != ToolRun.End.ANSWERED) {
        problem =
            run.end() == ToolRun.End.CUT
                ? "the reply ended with "
                    + run.result().finishReason()
                    + ": its calls may not be whole"
                : "the model calls tools again and again";
      }
    } catch (HeadraceException | IllegalArgumentException failed) {
      endLine(wrote);
      problem = failed.toString();
    }
    if (!problem.isEmpty()) {
      ERR.println("Tools: " + problem);
      System.exit(1);
    }
  }

  private static String option(List<String> words, String name) {
    int at = words.indexOf(name);
    if (at < 0) {
      return "";
    }
    words.remove(at);
    return words.remove(at);
  }

  private static void endLine(AtomicBoolean wrote) {
    if (wrote.getAndSet(false)) {
      OUT.println();
    }
  }
}
