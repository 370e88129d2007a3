package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.headrace.v1.ChatMessage;
import dev.headrace.v1.Delta;
import dev.headrace.v1.FinishReason;
import dev.headrace.v1.Finished;
import dev.headrace.v1.ResultEvent;
import dev.headrace.v1.ToolCallDelta;
import dev.headrace.v1.ToolChoiceMode;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Which calls are run, and what the model is told of the others. */
@Timeout(60)
class ToolRunTest {
  private Scripted server;
  private HeadraceClient client;
  private final List<String> ran = new ArrayList<>();

  @BeforeEach
  void start() throws Exception {
    server = new Scripted();
    client = server.client();
  }

  @AfterEach
  void stop() {
    client.close();
    server.close();
  }

  private static ResultEvent.Builder call(int index, String name, String arguments) {
    ToolCallDelta.Builder part =
        ToolCallDelta.newBuilder()
            .setIndex(index)
            .setId("id" + index)
            .setName(name)
            .setArgumentsJson(arguments);
    return ResultEvent.newBuilder().setDelta(Delta.newBuilder().addToolCalls(part));
  }

  private ToolRun run(Request.Builder request, int replies) {
    ToolRun.Function works =
        call -> {
          ran.add(call.arguments());
          return "it is " + call.arguments();
        };
    ToolRun.Function fails =
        call -> {
          throw new IllegalStateException("no water");
        };
    return client.runTools(
        request.build(),
        Map.of("works", works, "fails", fails),
        new ToolRun.Options(replies, chunk -> {}, conversation -> {}));
  }

  private static Request.Builder question() {
    return Request.chat(Message.user("go")).tools(List.of(new Tool("works", "", "{}")));
  }

  @Test
  void theModelIsToldWhatWentWrong() {
    server.reply(
        call(0, "works", "{\"a\": 1}"),
        call(1, "works", "[1]"),
        call(2, "unknown", "{}"),
        call(3, "fails", ""),
        Scripted.finished(FinishReason.FINISH_REASON_STOP)); // as arguments are no JSON object
    server.reply(Scripted.text("done"), Scripted.finished(FinishReason.FINISH_REASON_STOP));

    ToolRun run = run(question(), 8);

    assertEquals(ToolRun.End.ANSWERED, run.end());
    assertEquals("done", run.result().text());
    assertEquals(List.of("{\"a\": 1}"), ran);
    List<ChatMessage> told = server.requests.get(1).getChat().getMessagesList();
    assertEquals("{}", told.get(1).getToolCalls(1).getArgumentsJson());
    assertEquals(
        List.of(
            "it is {\"a\": 1}",
            "error: the arguments are no JSON object; they were [1]",
            "error: there is no tool unknown; there are fails, works",
            "error: no water"),
        told.subList(2, 6).stream().map(ChatMessage::getContent).toList());
    assertEquals("id3", told.get(5).getToolCallId());
    assertEquals(7, run.conversation().spec().getChat().getMessagesCount());
    assertNotEquals(server.requests.get(0).getRequestId(), server.requests.get(1).getRequestId());
  }

  @Test
  void callsThatMayNotBeWholeAreNotRun() {
    Finished.Builder atAString =
        Finished.newBuilder().setReason(FinishReason.FINISH_REASON_STOP).setStopString("}");
    server.reply(call(0, "works", "{"), ResultEvent.newBuilder().setFinished(atAString));
    server.reply(call(0, "works", "{"), Scripted.finished(FinishReason.FINISH_REASON_LENGTH));
    server.reply(call(0, "works", "{}"), Scripted.finished(FinishReason.FINISH_REASON_TOOL_CALLS));

    assertEquals(ToolRun.End.CUT, run(question(), 8).end());
    assertEquals(ToolRun.End.CUT, run(question(), 8).end());
    assertEquals(ToolRun.End.MAX_REPLIES, run(question(), 1).end());
    assertEquals(List.of(), ran);
  }

  @Test
  void aCallIsRequiredOnce() {
    server.reply(call(0, "works", "{}"), Scripted.finished(FinishReason.FINISH_REASON_TOOL_CALLS));
    server.reply(Scripted.text("done"), Scripted.finished(FinishReason.FINISH_REASON_STOP));
    ToolChoice choice =
        new ToolChoice(ToolChoice.Mode.REQUIRED, List.of("works"), Optional.of(true));

    run(question().toolChoice(choice), 8);

    var second = server.requests.get(1).getChat().getToolChoice();
    assertEquals(ToolChoiceMode.TOOL_CHOICE_MODE_AUTO, second.getMode());
    assertEquals(0, second.getToolNamesCount());
    assertTrue(second.getParallelCalls());
  }

  @Test
  void anInterruptEndsTheRun() {
    server.reply(call(0, "works", "{}"), Scripted.finished(FinishReason.FINISH_REASON_TOOL_CALLS));
    ToolRun.Function interrupted =
        call -> {
          throw new InterruptedException();
        };

    HeadraceException thrown =
        assertThrows(
            HeadraceException.class,
            () -> client.runTools(question().build(), Map.of("works", interrupted)));

    assertTrue(Thread.interrupted());
    assertEquals(Status.Code.CANCELLED, thrown.code());
  }
}
