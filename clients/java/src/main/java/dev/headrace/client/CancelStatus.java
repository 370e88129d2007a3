package dev.headrace.client;

/** What a cancel by a request's id found. */
public enum CancelStatus {
  /** A status newer than this package. */
  UNKNOWN,
  /** The request is being ended. */
  CANCELLED,
  /** It had ended. */
  ALREADY_FINISHED,
  /** There is no such request of this caller. */
  NOT_FOUND;

  static CancelStatus of(dev.headrace.v1.CancelStatus told) {
    return switch (told) {
      case CANCEL_STATUS_CANCELLED -> CANCELLED;
      case CANCEL_STATUS_ALREADY_FINISHED -> ALREADY_FINISHED;
      case CANCEL_STATUS_NOT_FOUND -> NOT_FOUND;
      default -> UNKNOWN;
    };
  }
}
