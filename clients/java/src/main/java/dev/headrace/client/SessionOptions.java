package dev.headrace.client;

import java.time.Duration;
import java.util.Optional;

/**
 * How a session is set up.
 *
 * @param lease how long requests go on, and their results are kept, after the connection was lost;
 *     the server may grant less. With a lease a lost session resumes by itself: what has output is
 *     attached again where it lives until the lease has passed, what has none is sent again. Zero:
 *     the requests of a lost session end with UNAVAILABLE
 * @param initialCredit how many tokens of each request the server may send ahead of its reader; so
 *     a request that is not read takes no more memory than that. 0: what is not read is kept here
 * @param roomTimeout for how long a request for which the server has no room is sent again, each
 *     time when the server said that it may have some; zero: the first refusal is the request's
 *     error; empty: as long as it takes
 */
public record SessionOptions(Duration lease, int initialCredit, Optional<Duration> roomTimeout) {

  /** No lease, no credits, and as long as it takes. */
  public static final SessionOptions DEFAULTS =
      new SessionOptions(Duration.ZERO, 0, Optional.empty());

  /**
   * Makes options. No number is negative.
   *
   * @param lease as above
   * @param initialCredit as above
   * @param roomTimeout as above
   * @throws HeadraceException if a value cannot be used
   */
  public SessionOptions {
    if (lease.isNegative()
        || initialCredit < 0
        || roomTimeout.map(Duration::isNegative).orElse(false)) {
      throw HeadraceException.invalid("session", "its times and its credit are at least 0");
    }
  }

  /**
   * These options with a lease.
   *
   * @param lease how long requests go on after the connection was lost
   * @return other options
   */
  public SessionOptions withLease(Duration lease) {
    return new SessionOptions(lease, initialCredit, roomTimeout);
  }

  /**
   * These options with credits.
   *
   * @param tokens how many of each request the server may send ahead of its reader
   * @return other options
   */
  public SessionOptions withInitialCredit(int tokens) {
    return new SessionOptions(lease, tokens, roomTimeout);
  }

  /**
   * These options with a bound for refused requests.
   *
   * @param timeout for how long they are sent again; zero: not at all
   * @return other options
   */
  public SessionOptions withRoomTimeout(Duration timeout) {
    return new SessionOptions(lease, initialCredit, Optional.of(timeout));
  }
}
