package dev.headrace.client;

import dev.headrace.v1.SamplingOptions;
import dev.headrace.v1.StopOptions;
import java.time.Instant;
import java.util.Optional;
import java.util.OptionalLong;

/**
 * That a server took a request, and with which parameters.
 *
 * @param requestId the request's id
 * @param promptTokens the prompt's length
 * @param queuePosition how many requests waited before it
 * @param choices how many outputs it has
 * @param time when it was accepted, by the server's clock, if that was told
 * @param sampling the values in force
 * @param stop the limits in force
 * @param adapterDigest the digest of its adapter's content, in hexadecimal; empty: it has none
 */
public record Accepted(
    String requestId,
    long promptTokens,
    long queuePosition,
    int choices,
    Optional<Instant> time,
    SamplingOptions sampling,
    StopOptions stop,
    String adapterDigest) {

  /**
   * The seed in force, if it was told.
   *
   * @return a number that makes the same draws again
   */
  public OptionalLong seed() {
    return sampling.hasSeed() ? OptionalLong.of(sampling.getSeed()) : OptionalLong.empty();
  }

  static Accepted of(String requestId, dev.headrace.v1.Accepted told) {
    return new Accepted(
        requestId,
        Integer.toUnsignedLong(told.getPromptTokens()),
        Integer.toUnsignedLong(told.getQueuePosition()),
        Math.max(told.getN(), 1),
        told.hasAcceptTime()
            ? Optional.of(
                Instant.ofEpochSecond(
                    told.getAcceptTime().getSeconds(), told.getAcceptTime().getNanos()))
            : Optional.empty(),
        told.getSampling(),
        told.getStop(),
        told.getAdapterDigest());
  }
}
