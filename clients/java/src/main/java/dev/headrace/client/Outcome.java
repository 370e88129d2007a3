package dev.headrace.client;

import java.util.Optional;

/**
 * What came of one request of a batch: a result, or an error.
 *
 * @param index the request's place in the batch, from 0
 * @param result its output; empty: it failed
 * @param error why it failed; empty: it did not
 */
public record Outcome(int index, Optional<Result> result, Optional<HeadraceException> error) {

  /**
   * The result.
   *
   * @return its output
   * @throws HeadraceException why it failed
   */
  public Result orThrow() {
    return result.orElseThrow(() -> error.orElseThrow());
  }
}
