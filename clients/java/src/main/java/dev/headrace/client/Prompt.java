package dev.headrace.client;

import dev.headrace.v1.PromptProcessed;
import java.util.List;

/**
 * How a prompt was processed.
 *
 * @param tokens its length in tokens
 * @param cachedTokens of them, those found in the prefix cache
 * @param details its tokens, if their log-probabilities were asked for
 */
public record Prompt(long tokens, long cachedTokens, List<Token> details) {
  static Prompt of(PromptProcessed told) {
    return new Prompt(
        Integer.toUnsignedLong(told.getPromptTokens()),
        Integer.toUnsignedLong(told.getCachedTokens()),
        Token.of(told.getTokensList()));
  }
}
