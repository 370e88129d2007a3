package dev.headrace.client;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.Strictness;
import dev.headrace.v1.ChatInput;
import dev.headrace.v1.ToolChoiceMode;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.function.Consumer;

/**
 * A conversation in which the model called tools, as {@link HeadraceClient#runTools} holds it.
 *
 * @param end why it ended
 * @param result the model's last reply
 * @param conversation the request with the whole conversation, to be continued with {@link
 *     Request.Builder#message}; a last reply whose calls were not run is not in it
 */
public record ToolRun(End end, Result result, Request conversation) {
  private static final int DEFAULT_REPLIES = 8;
  private static final int MOST_QUOTED = 1000;
  private static final Gson STRICT = new GsonBuilder().setStrictness(Strictness.STRICT).create();

  /** Without it calls would come as text. */
  private static final List<String> CAPABILITIES = List.of("typed_replies");

  /** Why a run of tools ended. */
  public enum End {
    /** The last reply calls no tool. */
    ANSWERED,
    /** The last reply was cut. Its calls were not run: they may not be whole. */
    CUT,
    /** The last reply allowed has calls, which were not run. */
    MAX_REPLIES
  }

  /** Runs calls of a tool. */
  @FunctionalInterface
  public interface Function {
    /**
     * Runs a call.
     *
     * @param call the call; its arguments are the text of a JSON object, or empty
     * @return what the model is told
     * @throws Exception is told to the model too, which may try again; but an interrupt ends the
     *     run
     */
    String run(ToolCall call) throws Exception;
  }

  /**
   * How a run is set up.
   *
   * @param maxReplies how many replies the model may make; calls in the last one are not run
   * @param onChunk is called with each piece of output as it comes
   * @param onTurn is called with the conversation, each time when a reply's calls were run: who
   *     keeps it can go on there if the run fails
   */
  public record Options(int maxReplies, Consumer<Chunk> onChunk, Consumer<Request> onTurn) {
    /** At most 8 replies. */
    public static final Options DEFAULTS =
        new Options(DEFAULT_REPLIES, chunk -> {}, conversation -> {});

    /**
     * Makes options.
     *
     * @param maxReplies as above
     * @param onChunk as above
     * @param onTurn as above
     * @throws HeadraceException if a value cannot be used
     */
    public Options {
      if (maxReplies < 1) {
        throw HeadraceException.invalid("max_replies", maxReplies + " is not at least 1");
      }
    }
  }

  static ToolRun hold(
      HeadraceClient client, Request request, Map<String, Function> functions, Options options) {
    ChatInput chat = request.spec().getChat();
    if (chat.getMessagesCount() == 0 || chat.getToolsCount() == 0) {
      throw HeadraceException.invalid("messages", "and tools are needed for a run of tools");
    }
    Request turn = request;
    for (int reply = 1; ; reply++) {
      Result result = read(client.stream(turn, CAPABILITIES), options.onChunk());
      List<ToolCall> calls = result.toolCalls();
      if (calls.isEmpty() && result.finishReason() == FinishReason.STOP) {
        Request whole = turn.toBuilder().message(result.message()).build();
        return new ToolRun(End.ANSWERED, result, whole);
      }
      if (!endedByItself(result.first())) {
        return new ToolRun(End.CUT, result, turn);
      }
      if (reply >= options.maxReplies()) {
        return new ToolRun(End.MAX_REPLIES, result, turn);
      }
      Request.Builder next = turn.toBuilder().id(""); // the next reply is a request of its own
      next.message(asTaken(result.message()));
      for (ToolCall call : calls) {
        next.message(Message.tool(call, answer(call, functions)));
      }
      turn = withoutForce(next.build());
      options.onTurn().accept(turn);
    }
  }

  /**
   * Whether nothing cut the reply. One with STOP has a call whose arguments are no JSON: the model
   * is told.
   */
  private static boolean endedByItself(Choice reply) {
    return reply.finishReason() == FinishReason.TOOL_CALLS
        || reply.finishReason() == FinishReason.STOP && reply.stopString().isEmpty();
  }

  private static Result read(GenerationStream stream, Consumer<Chunk> onChunk) {
    try (stream) {
      stream.forEach(onChunk);
      return stream.result();
    }
  }

  private static String answer(ToolCall call, Map<String, Function> functions) {
    Function run = functions.get(call.name());
    String told;
    if (run == null) {
      told =
          "error: there is no tool "
              + call.name()
              + "; there are "
              + String.join(", ", new TreeSet<>(functions.keySet()));
    } else if (!isObject(call.arguments())) {
      int end = Math.min(call.arguments().length(), MOST_QUOTED);
      if (end > 0 && Character.isHighSurrogate(call.arguments().charAt(end - 1))) {
        end--;
      }
      told =
          "error: the arguments are no JSON object; they were "
              + call.arguments().substring(0, end);
    } else {
      try {
        told = run.run(call);
      } catch (InterruptedException asked) {
        throw Futures.interrupted("");
      } catch (Exception failed) { // whatever it is, the model may do something about it
        told = "error: " + (failed.getMessage() == null ? failed.toString() : failed.getMessage());
      }
    }
    if (Thread.currentThread().isInterrupted()) {
      throw Futures.interrupted("");
    }
    return told;
  }

  private static boolean isObject(String arguments) {
    try {
      return arguments.isEmpty() || STRICT.fromJson(arguments, JsonObject.class) != null;
    } catch (JsonParseException no) {
      return false;
    }
  }

  /** A reply as templates take it back: arguments that are no object are left out. */
  private static Message asTaken(Message reply) {
    return reply.withToolCalls(
        reply.toolCalls().stream()
            .map(
                call ->
                    isObject(call.arguments()) ? call : new ToolCall(call.id(), call.name(), "{}"))
            .toList());
  }

  /**
   * A call that was required is so once; the one tool that was to be called is not the only one.
   */
  private static Request withoutForce(Request request) {
    dev.headrace.v1.ToolChoice choice = request.spec().getChat().getToolChoice();
    if (choice.getMode() != ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED) {
      return request;
    }
    dev.headrace.v1.ToolChoice.Builder freed =
        choice.toBuilder().setMode(ToolChoiceMode.TOOL_CHOICE_MODE_AUTO);
    if (choice.getToolNamesCount() == 1) {
      freed.clearToolNames();
    }
    var spec = request.spec().toBuilder();
    spec.getChatBuilder().setToolChoice(freed);
    return Request.of(spec.build()).build();
  }
}
