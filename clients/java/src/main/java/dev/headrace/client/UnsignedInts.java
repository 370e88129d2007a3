package dev.headrace.client;

import java.util.AbstractList;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.RandomAccess;

/** Unsigned 32-bit numbers, such as token ids, as a list that takes no more room than they do. */
final class UnsignedInts extends AbstractList<Long> implements RandomAccess {
  static final UnsignedInts NONE = new UnsignedInts(new int[0], 0);

  private final int[] values; // beyond the size: a builder's, which only appends
  private final int size;

  private UnsignedInts(int[] values, int size) {
    this.values = values;
    this.size = size;
  }

  static UnsignedInts of(List<Integer> told) {
    return of(told.stream().mapToInt(Integer::intValue).toArray());
  }

  /** These numbers; the array is the list's from then on. */
  static UnsignedInts of(int[] values) {
    return values.length == 0 ? NONE : new UnsignedInts(values, values.length);
  }

  @Override
  public Long get(int index) {
    Objects.checkIndex(index, size);
    return Integer.toUnsignedLong(values[index]);
  }

  @Override
  public int size() {
    return size;
  }

  /** Collects numbers. What was built stays as it is. */
  static final class Builder {
    private int[] values = new int[16];
    private int size;

    void addAll(UnsignedInts more) {
      if (size + more.size > values.length) {
        values = Arrays.copyOf(values, Math.max(2 * values.length, size + more.size));
      }
      System.arraycopy(more.values, 0, values, size, more.size);
      size += more.size;
    }

    int size() {
      return size;
    }

    UnsignedInts build() {
      return size == 0 ? NONE : new UnsignedInts(values, size);
    }

    Builder copy() {
      Builder made = new Builder();
      made.values = values.clone();
      made.size = size;
      return made;
    }
  }
}
