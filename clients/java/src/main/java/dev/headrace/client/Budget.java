package dev.headrace.client;

/**
 * Tells whether what failed may be sent again at once: a failure takes a token of a bucket, a
 * success gives back a tenth of one, and while it is at most half full nothing may.
 */
final class Budget {
  private static final double TOKENS = 100;
  private static final double SUCCESS = 0.1;

  private double left = TOKENS;

  boolean failed() {
    left = Math.max(left - 1, 0);
    return left > TOKENS / 2;
  }

  void succeeded() {
    left = Math.min(left + SUCCESS, TOKENS);
  }
}
