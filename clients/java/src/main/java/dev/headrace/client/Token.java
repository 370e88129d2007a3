package dev.headrace.client;

import com.google.protobuf.ByteString;
import dev.headrace.v1.TokenCandidate;
import dev.headrace.v1.TokenInfo;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.OptionalLong;

/**
 * One token with its details.
 *
 * @param id its id, an unsigned number of 32 bits
 * @param text its own text; a part of a character shows as U+FFFD
 * @param bytes its own bytes; joined, they are the text in UTF-8
 * @param logprob its log-probability, if it was asked for
 * @param rank its rank by probability, from 1, if it was asked for
 * @param candidates the most likely tokens at its place, then those that were asked for by id
 * @param elapsed the time from the request's acceptance, if it was asked for
 */
public record Token(
    long id,
    String text,
    ByteString bytes,
    Optional<Float> logprob,
    OptionalLong rank,
    List<Candidate> candidates,
    Optional<Duration> elapsed) {

  /**
   * A token that could have been chosen.
   *
   * @param id its id, an unsigned number of 32 bits
   * @param text its own text
   * @param bytes its own bytes
   * @param logprob its log-probability
   */
  public record Candidate(long id, String text, ByteString bytes, float logprob) {}

  static List<Token> of(List<TokenInfo> told) {
    if (told.isEmpty()) {
      return List.of();
    }
    List<Token> tokens = new ArrayList<>(told.size());
    for (TokenInfo one : told) {
      List<Candidate> candidates = new ArrayList<>(one.getCandidatesCount());
      for (TokenCandidate other : one.getCandidatesList()) {
        candidates.add(
            new Candidate(
                Integer.toUnsignedLong(other.getId()),
                other.getText(),
                other.getBytes(),
                other.getLogprob()));
      }
      tokens.add(
          new Token(
              Integer.toUnsignedLong(one.getId()),
              one.getText(),
              one.getBytes(),
              one.hasLogprob() ? Optional.of(one.getLogprob()) : Optional.empty(),
              one.hasRank()
                  ? OptionalLong.of(Integer.toUnsignedLong(one.getRank()))
                  : OptionalLong.empty(),
              List.copyOf(candidates),
              Durations.when(one.hasElapsedDuration(), one.getElapsedDuration())));
    }
    return List.copyOf(tokens);
  }
}
