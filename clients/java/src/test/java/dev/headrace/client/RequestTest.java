package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.headrace.v1.GenerationSpec;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** What a request's message has, and what it cannot have. */
class RequestTest {
  private static void assertRefused(String field, Executable making) {
    HeadraceException thrown = assertThrows(HeadraceException.class, making);
    assertEquals(field, thrown.fields().get(0).field());
  }

  @Test
  void whatIsNotSetIsNotSent() {
    GenerationSpec spec = Request.text("a").build().spec();

    assertFalse(spec.hasSampling() || spec.hasStop() || spec.hasOutput() || spec.hasScheduling());
  }

  @Test
  void aZeroIsSent() {
    GenerationSpec spec = Request.text("a").temperature(0).maxTokens(0).build().spec();

    assertTrue(spec.getSampling().hasTemperature());
    assertTrue(spec.getStop().hasMaxTokens());
  }

  @Test
  void eachCallWithoutAnIdIsARequestOfItsOwn() {
    Request request = Request.text("a").build();

    assertNotEquals(request.toSend().getRequestId(), request.toSend().getRequestId());
    assertEquals("b", request.toBuilder().id("b").build().toSend().getRequestId());
  }

  @Test
  void tokenIdsHave32Bits() {
    Request request = Request.tokens(List.of(0xFFFF_FFFFL)).build();

    assertEquals(List.of(0xFFFF_FFFFL), UnsignedInts.of(request.spec().getTokens().getIdsList()));
    assertRefused("token_ids", () -> Request.tokens(List.of(0x1_0000_0000L)));
    assertRefused("token_ids", () -> Request.tokens(List.of(-1)));
  }

  @Test
  void aPredictionIsTextOrTokenIds() {
    assertEquals("b", Request.text("a").prediction("b").build().spec().getPrediction().getText());
    assertEquals(
        List.of(3, 4),
        Request.text("a")
            .prediction(List.of(3, 4))
            .build()
            .spec()
            .getPrediction()
            .getTokens()
            .getIdsList());
    assertRefused("prediction", () -> Request.text("a").prediction(List.of(-1)));
  }

  @Test
  void valuesThatCannotBeSent() {
    assertRefused("text", () -> Request.text("a\ud800"));
    assertRefused("max_tokens", () -> Request.text("a").maxTokens(-1));
    assertRefused("seed", () -> Request.text("a").seed(-1));
    assertRefused("tools", () -> Request.text("a").tools(List.of()));
    Request.text("😀");
  }

  @Test
  void capabilitiesAreThoseOfWhatIsSet() {
    Request request =
        Request.chat(Message.user("a"))
            .tools(List.of(new Tool("t", "", "{}")))
            .toolChoice(new ToolChoice(ToolChoice.Mode.AUTO))
            .priority(1)
            .adapter("team-a")
            .build();

    assertEquals(
        List.of("adapters", "chat", "priorities", "tool_choice", "tools", "x"),
        List.copyOf(Capabilities.of(request.spec(), List.of("x"))));
    assertTrue(Capabilities.of(Request.text("a").build().spec(), List.of()).isEmpty());
  }
}
