package dev.headrace.client;

import java.util.LinkedHashMap;
import java.util.Map;

/** A map that forgets what was not put for longest. */
final class Recent<V> {
  private final LinkedHashMap<String, V> entries = new LinkedHashMap<>();
  private final int most;

  Recent(int most) {
    this.most = most;
  }

  V get(String key) {
    return entries.get(key);
  }

  void put(String key, V value) {
    entries.remove(key);
    entries.put(key, value);
    if (entries.size() > most) {
      Map.Entry<String, V> oldest = entries.entrySet().iterator().next();
      entries.remove(oldest.getKey());
    }
  }
}
