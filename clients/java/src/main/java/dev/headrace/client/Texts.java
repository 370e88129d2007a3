package dev.headrace.client;

/** Texts that can be sent. */
final class Texts {
  private Texts() {}

  /** The text, if it can be sent: half of a surrogate pair has no form in UTF-8. */
  static String sendable(String field, String text) {
    for (int i = 0; i < text.length(); i++) {
      char one = text.charAt(i);
      if (Character.isHighSurrogate(one)
          && i + 1 < text.length()
          && Character.isLowSurrogate(text.charAt(i + 1))) {
        i++;
      } else if (Character.isSurrogate(one)) {
        throw HeadraceException.invalid(
            field, "has half of a surrogate pair at " + i + ", which has no form in UTF-8");
      }
    }
    return text;
  }
}
