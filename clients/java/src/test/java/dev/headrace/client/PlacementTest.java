package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;

import dev.headrace.client.Placement.Candidate;
import java.util.List;
import java.util.stream.LongStream;
import org.junit.jupiter.api.Test;

/** The vectors and rules of docs/fleet.md. */
class PlacementTest {
  private static PrefixKeys keys(Request.Builder request) {
    return PrefixKeys.of(request.build().spec());
  }

  private static Candidate free(String name) {
    return new Candidate(name, 0, 4, 0);
  }

  @Test
  void theKeyOfText() {
    PrefixKeys found = keys(Request.text("a".repeat(2000)));

    assertEquals(new PrefixKeys("e57e1cdbf524ce1c", "e57e1cdbf524ce1c"), found);
    List<Candidate> ordered =
        Placement.rendezvous(found.shared(), List.of(free("c"), free("a"), free("b")));
    assertEquals(List.of("a", "b", "c"), ordered.stream().map(Candidate::name).toList());
  }

  @Test
  void theKeyOfTokenIds() {
    List<Long> ids = LongStream.range(0, 300).boxed().toList();

    assertEquals("844d4a050671a7ca", keys(Request.tokens(ids)).own());
    assertNull(keys(Request.tokens(ids.subList(0, 63))));
  }

  @Test
  void theKeysOfAConversation() {
    PrefixKeys found = keys(Request.chat(Message.system("s".repeat(300)), Message.user("hi")));

    assertEquals(new PrefixKeys("923bf3b05a357e08", "9acc8f49988cc8c1"), found);
  }

  @Test
  void shortPromptsHaveNone() {
    assertNull(keys(Request.text("a".repeat(255))));
    assertNull(keys(Request.text("a".repeat(2000)).bypassPrefixCache()));
  }

  @Test
  void theSaltIsOfTheKey() {
    String text = "a".repeat(2000);

    assertNotEquals(keys(Request.text(text)), keys(Request.text(text).cacheSalt("b")));
  }

  @Test
  void aPrefixStaysWhereItWent() {
    Placement placement = new Placement();
    PrefixKeys keys = keys(Request.text("a".repeat(2000)));
    List<Candidate> busy = List.of(new Candidate("a", 4, 4, 0), free("b"), free("c"));

    assertEquals("b", placement.choose(keys, busy)); // the first of the order has no free place
    assertEquals("b", placement.choose(keys, List.of(free("a"), free("b"), free("c"))));
  }

  @Test
  void withoutAKeyTheLeastLoaded() {
    Placement placement = new Placement();

    assertEquals(
        "b",
        placement.choose(null, List.of(new Candidate("a", 2, 4, 1), new Candidate("b", 3, 8, 2))));
    assertEquals(
        "a",
        placement.choose(null, List.of(new Candidate("b", 1, 4, 2), new Candidate("a", 1, 4, 1))));
  }
}
