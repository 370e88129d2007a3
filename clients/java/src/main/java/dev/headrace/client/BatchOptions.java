package dev.headrace.client;

/**
 * How a batch is run.
 *
 * @param maxInFlight how many requests are with the server at a time
 * @param ordered whether outcomes come in the order of their requests, not of their ends
 */
public record BatchOptions(int maxInFlight, boolean ordered) {
  /** 64 at a time, in the order of their ends. */
  public static final BatchOptions DEFAULTS = new BatchOptions(64, false);

  /**
   * Makes options.
   *
   * @param maxInFlight as above
   * @param ordered as above
   * @throws HeadraceException if a value cannot be used
   */
  public BatchOptions {
    if (maxInFlight < 1) {
      throw HeadraceException.invalid("max_in_flight", maxInFlight + " is not at least 1");
    }
  }
}
