package dev.headrace.client;

import dev.headrace.v1.Finished;
import dev.headrace.v1.GeneratedChoice;
import java.util.List;
import java.util.Optional;
import java.util.OptionalLong;

/**
 * One of a request's outputs.
 *
 * @param index which of the request's choices it is
 * @param text what the model wrote: in the reply to a conversation, without reasoning and tool
 *     calls
 * @param reasoning what the model thought before it answered
 * @param toolCalls the tools that it called, in order
 * @param tokenIds the ids of all its tokens, unsigned numbers of 32 bits
 * @param tokens the tokens with their details, if they were asked for
 * @param finishReason why it ended
 * @param stopString what was found, if a stop string ended it
 * @param stopTokenId what was generated, if a stop or end-of-sequence id ended it
 * @param usage its cost; prompt and cached tokens are the request's, and count once
 * @param timings how long it took
 */
public record Choice(
    int index,
    String text,
    String reasoning,
    List<ToolCall> toolCalls,
    List<Long> tokenIds,
    List<Token> tokens,
    FinishReason finishReason,
    Optional<String> stopString,
    OptionalLong stopTokenId,
    Usage usage,
    Timings timings) {

  static Choice of(
      int index,
      String text,
      String reasoning,
      List<ToolCall> toolCalls,
      List<Long> tokenIds,
      List<Token> tokens,
      Finished end) {
    return new Choice(
        index,
        text,
        reasoning,
        toolCalls,
        tokenIds,
        tokens,
        FinishReason.of(end.getReason()),
        end.hasStopString() ? Optional.of(end.getStopString()) : Optional.empty(),
        end.hasStopTokenId()
            ? OptionalLong.of(Integer.toUnsignedLong(end.getStopTokenId()))
            : OptionalLong.empty(),
        Usage.of(end.getUsage()),
        Timings.of(end.getTimings()));
  }

  static Choice of(GeneratedChoice told) {
    List<ToolCall> calls =
        told.getToolCallsList().stream()
            .map(call -> new ToolCall(call.getId(), call.getName(), call.getArgumentsJson()))
            .toList();
    return of(
        told.getIndex(),
        told.getText(),
        told.getReasoning(),
        calls,
        UnsignedInts.of(told.getTokenIdsList()),
        Token.of(told.getTokensList()),
        told.getFinished());
  }
}
