package dev.headrace.client;

/**
 * A cost in tokens. The numbers are not negative.
 *
 * @param promptTokens the prompt's
 * @param cachedTokens of them, those found in the prefix cache
 * @param completionTokens those generated and delivered
 * @param reasoningTokens of them, those that were reasoning
 * @param draftTokens those guessed and computed, wrong ones included
 * @param acceptedDraftTokens of them, those that were right and needed no step of their own
 * @param predictionDraftTokens of the draft tokens, those guessed from the request's prediction
 * @param acceptedPredictionDraftTokens of these, those that were right
 */
public record Usage(
    long promptTokens,
    long cachedTokens,
    long completionTokens,
    long reasoningTokens,
    long draftTokens,
    long acceptedDraftTokens,
    long predictionDraftTokens,
    long acceptedPredictionDraftTokens) {
  static final Usage NONE = prompt(0, 0);

  /** The cost of a prompt alone. */
  static Usage prompt(long tokens, long cachedTokens) {
    return new Usage(tokens, cachedTokens, 0, 0, 0, 0, 0, 0);
  }

  static Usage of(dev.headrace.v1.Usage told) {
    return new Usage(
        Integer.toUnsignedLong(told.getPromptTokens()),
        Integer.toUnsignedLong(told.getCachedTokens()),
        Integer.toUnsignedLong(told.getCompletionTokens()),
        Integer.toUnsignedLong(told.getReasoningTokens()),
        Integer.toUnsignedLong(told.getDraftTokens()),
        Integer.toUnsignedLong(told.getAcceptedDraftTokens()),
        Integer.toUnsignedLong(told.getPredictionDraftTokens()),
        Integer.toUnsignedLong(told.getAcceptedPredictionDraftTokens()));
  }

  /** This cost and that of another choice of the same request, whose prompt counts once. */
  Usage and(Usage other) {
    return new Usage(
        Math.max(promptTokens, other.promptTokens),
        Math.max(cachedTokens, other.cachedTokens),
        completionTokens + other.completionTokens,
        reasoningTokens + other.reasoningTokens,
        draftTokens + other.draftTokens,
        acceptedDraftTokens + other.acceptedDraftTokens,
        predictionDraftTokens + other.predictionDraftTokens,
        acceptedPredictionDraftTokens + other.acceptedPredictionDraftTokens);
  }
}
