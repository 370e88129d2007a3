package dev.headrace.client;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;

/**
 * Chooses servers by docs/fleet.md, and remembers where prefixes went. Its user keeps threads
 * apart.
 */
final class Placement {
  private static final double BOUND_FACTOR = 1.25;
  private static final int REMEMBERED = 4096;

  private final Recent<String> homes = new Recent<>(REMEMBERED);

  /**
   * A server to choose.
   *
   * @param name its instance, by which all clients know it
   * @param load how many requests it has
   * @param capacity how many it runs at a time
   * @param turn when it was chosen last
   */
  record Candidate(String name, long load, long capacity, long turn) {}

  /** The name of the server for a request; there is a candidate, and no two have the same name. */
  String choose(PrefixKeys keys, List<Candidate> candidates) {
    if (keys == null) {
      return leastLoaded(candidates).name();
    }
    String chosen =
        candidates.size() > 1 ? withinBounds(keys, candidates).name() : candidates.get(0).name();
    homes.put(keys.own(), chosen);
    return chosen;
  }

  /** A key's order of preference among servers. */
  static List<Candidate> rendezvous(String key, List<Candidate> candidates) {
    List<Candidate> ordered = new ArrayList<>(candidates);
    ordered.sort(
        Comparator.<Candidate, String>comparing(one -> PrefixKeys.rank(key, one.name()))
            .thenComparing(Candidate::name)
            .reversed());
    return ordered;
  }

  private Candidate withinBounds(PrefixKeys keys, List<Candidate> candidates) {
    long total = 1;
    long room = 0;
    boolean someoneIsFree = false;
    for (Candidate one : candidates) {
      total += one.load();
      room += one.capacity();
      someoneIsFree |= one.load() < one.capacity();
    }
    List<Candidate> ordered = rendezvous(keys.shared(), candidates);
    String home = homes.get(keys.own());
    ordered.stream()
        .filter(one -> one.name().equals(home))
        .findFirst()
        .ifPresent(one -> ordered.add(0, one));
    for (Candidate one : ordered) {
      long bound = (long) Math.ceil(BOUND_FACTOR * total * one.capacity() / room) + 1;
      // A prefix is not worth a wait where another server would begin at once.
      if (one.load() < bound && (one.load() < one.capacity() || !someoneIsFree)) {
        return one;
      }
    }
    return leastLoaded(candidates);
  }

  private static Candidate leastLoaded(List<Candidate> candidates) {
    Comparator<Candidate> byShare =
        (a, b) -> Long.compare(a.load * b.capacity, b.load * a.capacity);
    return candidates.stream().min(byShare.thenComparingLong(Candidate::turn)).orElseThrow();
  }
}
