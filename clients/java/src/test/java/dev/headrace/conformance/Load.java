package dev.headrace.conformance;

import dev.headrace.client.Chunk;
import dev.headrace.client.Handle;
import dev.headrace.client.HeadraceClient;
import dev.headrace.client.Request;
import dev.headrace.client.Session;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/**
 * Plays turns of load for the comparison of the client libraries; {@code benchmarks/languages} says
 * what a turn is. Its arguments are TARGET SESSIONS REQUESTS TOKENS. It reads one request after the
 * other: what comes of the others meanwhile is kept for it, and no thread is needed for each.
 */
final class Load {
  private Load() {}

  public static void main(String[] arguments) throws IOException {
    int sessions = Integer.parseInt(arguments[1]);
    int requests = Integer.parseInt(arguments[2]);
    int tokens = Integer.parseInt(arguments[3]);
    BufferedReader lines =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    try (HeadraceClient client = HeadraceClient.connect(arguments[0])) {
      while (lines.readLine() != null) {
        System.out.println("{\"tokens\": " + turn(client, sessions, requests, tokens) + "}");
        System.out.flush();
      }
    }
  }

  /** Plays one turn; returns how many tokens came. */
  private static long turn(HeadraceClient client, int sessions, int requests, int tokens) {
    Request request =
        Request.text("Once upon a time").temperature(0).maxTokens(tokens).ignoreEos().build();
    List<Session> opened = new ArrayList<>();
    List<Handle> handles = new ArrayList<>();
    for (int session = 0; session < sessions; session++) {
      opened.add(client.session());
      for (int number = 0; number < requests; number++) {
        handles.add(opened.get(session).submit(request));
      }
    }
    long count = 0;
    for (Handle handle : handles) {
      for (Chunk chunk : handle) {
        count += chunk.tokenIds().size();
      }
    }
    for (Session session : opened) {
      session.finish();
      session.close();
    }
    return count;
  }
}
