package dev.headrace.client;

/** Why a choice ended. */
public enum FinishReason {
  /** It has not ended, as that of a failed request; or for a reason newer than this package. */
  UNKNOWN,
  /** A stop string, a stop id or an end-of-sequence token. */
  STOP,
  /** The most tokens that were asked for are there. */
  LENGTH,
  /** The context is full. */
  CONTEXT,
  /** It was cancelled. */
  CANCELLED,
  /** Its time limit was reached. */
  TIME_LIMIT,
  /** It stopped after tool calls, whose arguments are whole. */
  TOOL_CALLS;

  static FinishReason of(dev.headrace.v1.FinishReason told) {
    return switch (told) {
      case FINISH_REASON_STOP -> STOP;
      case FINISH_REASON_LENGTH -> LENGTH;
      case FINISH_REASON_CONTEXT -> CONTEXT;
      case FINISH_REASON_CANCELLED -> CANCELLED;
      case FINISH_REASON_TIME_LIMIT -> TIME_LIMIT;
      case FINISH_REASON_TOOL_CALLS -> TOOL_CALLS;
      default -> UNKNOWN;
    };
  }
}
