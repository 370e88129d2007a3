package dev.headrace.client;

import java.util.List;

/**
 * A piece of a choice's output. The texts of all its chunks, joined, are the text.
 *
 * @param choice which of the request's choices it belongs to
 * @param seq the event's number in the request
 * @param offset how many tokens of the choice came before it; an attached one counts from where it
 *     began
 * @param text the new text; it may be empty: characters are never split
 * @param reasoning new reasoning
 * @param toolCalls parts of tool calls
 * @param tokenIds the ids of the new tokens, unsigned numbers of 32 bits
 * @param tokens the new tokens with their details, if they were asked for
 */
public record Chunk(
    int choice,
    long seq,
    int offset,
    String text,
    String reasoning,
    List<ToolCallPart> toolCalls,
    List<Long> tokenIds,
    List<Token> tokens) {

  /**
   * A piece of a tool call.
   *
   * @param index which of the reply's calls it belongs to
   * @param id the call's id, in its first part; else empty
   * @param name the tool's name, in the call's first part; else empty
   * @param arguments the next piece of the arguments' text
   */
  public record ToolCallPart(int index, String id, String name, String arguments) {}
}
