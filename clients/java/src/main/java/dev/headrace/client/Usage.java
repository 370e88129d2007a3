package dev.headrace.client;

/**
 * A cost in tokens. The numbers are not negative.
 *
 * @param promptTokens the prompt's
 * @param cachedTokens of them, those found in the prefix cache
 * @param completionTokens those generated and delivered
 * @param reasoningTokens of them, those that were reasoning
 */
public record Usage(
    long promptTokens, long cachedTokens, long completionTokens, long reasoningTokens) {
  static final Usage NONE = new Usage(0, 0, 0, 0);

  static Usage of(dev.headrace.v1.Usage told) {
    return new Usage(
        Integer.toUnsignedLong(told.getPromptTokens()),
        Integer.toUnsignedLong(told.getCachedTokens()),
        Integer.toUnsignedLong(told.getCompletionTokens()),
        Integer.toUnsignedLong(told.getReasoningTokens()));
  }

  /** This cost and that of another choice of the same request, whose prompt counts once. */
  Usage and(Usage other) {
    return new Usage(
        Math.max(promptTokens, other.promptTokens),
        Math.max(cachedTokens, other.cachedTokens),
        completionTokens + other.completionTokens,
        reasoningTokens + other.reasoningTokens);
  }
}
