package dev.headrace.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.grpc.Status;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** What targets may be, and where a token may travel. */
class TargetTest {
  @ParameterizedTest
  @CsvSource({
    "localhost, localhost:50051, true",
    "10.0.0.1:7, 10.0.0.1:7, false",
    "127.0.0.5, 127.0.0.5:50051, true",
    "[::1]:7, [::1]:7, true",
    "ipv4:127.0.0.1:7, 127.0.0.1:7, true",
    "/run/a.sock, unix:/run/a.sock, true",
    "./a.sock, unix:./a.sock, true",
    "unix:/run/a.sock, unix:/run/a.sock, true",
    "dns:///name, dns:///name:50051, false",
    "dns:///localhost:7, dns:///localhost:7, true",
    "1.example, 1.example:50051, false",
  })
  void aPlace(String text, String told, boolean isLocal) {
    List<Target> found = Target.parse(List.of(text));

    assertEquals(1, found.size());
    assertEquals(told, found.get(0).toString());
    assertEquals(isLocal, found.get(0).isLocal());
  }

  @Test
  void severalPlacesEachOnce() {
    List<Target> found = Target.parse(List.of("a:1,b:2", "a:1"));

    assertEquals(List.of("a:1", "b:2"), found.stream().map(Target::toString).toList());
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "a:1,", "http://a:1", "a:b", "a:70000", "dns:///", "a b:c:d"})
  void noPlace(String text) {
    HeadraceException thrown =
        assertThrows(HeadraceException.class, () -> Target.parse(List.of(text)));

    assertEquals(Status.Code.INVALID_ARGUMENT, thrown.code());
    assertEquals("target", thrown.fields().get(0).field());
  }

  @Test
  void aTokenStaysOnThisMachine() {
    HeadraceException thrown =
        assertThrows(
            HeadraceException.class,
            () -> HeadraceClient.builder("localhost:1,10.0.0.1:1").token("secret").build());

    assertEquals("token", thrown.fields().get(0).field());
    HeadraceClient.builder("10.0.0.1:1").token("secret").allowPlaintextToken().build().close();
    HeadraceClient.builder("unix:/nowhere").token("secret").build().close();
  }
}
