package dev.headrace.client;

import com.google.protobuf.ByteString;
import dev.headrace.v1.ChatInput;
import dev.headrace.v1.ChatMessage;
import dev.headrace.v1.ChatRole;
import dev.headrace.v1.ContentPart;
import dev.headrace.v1.GenerationSpec;
import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;

/**
 * The keys of a prompt, as digests in hexadecimal: shared decides the order of servers, own is what
 * is remembered. docs/fleet.md has the rules, which are the same for clients in all languages.
 */
record PrefixKeys(String shared, String own) {
  private static final int HEAD_BYTES = 1024;
  private static final int HEAD_TOKENS = 256;
  private static final int CHAT_BYTES = 4096;
  private static final int LEAST_BYTES = 256;
  private static final int LEAST_TOKENS = 64;

  /** The keys of a request's prompt; null: it has no prefix that is worth a preference. */
  static PrefixKeys of(GenerationSpec spec) {
    if (spec.getCache().getBypassPrefixCache()) {
      return null;
    }
    byte[] salt = (spec.getCache().getSalt() + "\0").getBytes(StandardCharsets.UTF_8);
    byte[] head;
    switch (spec.getInputCase()) {
      case TEXT:
        ByteString text = spec.getText().getTextBytes();
        if (text.size() < LEAST_BYTES) {
          return null;
        }
        head = text.substring(0, Math.min(text.size(), HEAD_BYTES)).toByteArray();
        break;
      case TOKENS:
        List<Integer> ids = spec.getTokens().getIdsList();
        if (ids.size() < LEAST_TOKENS) {
          return null;
        }
        head = bigEndian(ids.subList(0, Math.min(ids.size(), HEAD_TOKENS)));
        break;
      case CHAT:
        return ofChat(salt, spec.getChat());
      default:
        return null;
    }
    String key = digest(joined(salt, head));
    return new PrefixKeys(key, key);
  }

  private static PrefixKeys ofChat(byte[] salt, ChatInput chat) {
    StringBuilder opening = new StringBuilder();
    for (dev.headrace.v1.Tool tool : chat.getToolsList()) {
      opening.append(tool.getDefinitionJson()).append('\0');
      opening.append(tool.getName()).append('\0');
      opening.append(tool.getDescription()).append('\0');
      opening.append(tool.getParametersJson()).append('\0');
    }
    String following = "";
    for (ChatMessage message : chat.getMessagesList()) {
      String text = text(message);
      if (message.getRole() != ChatRole.CHAT_ROLE_SYSTEM
          && message.getRole() != ChatRole.CHAT_ROLE_DEVELOPER) {
        following = text;
        break;
      }
      opening.append(text);
    }
    byte[] head = cut(opening.toString());
    byte[] shared = joined(salt, head);
    String own = digest(joined(joined(shared, new byte[1]), cut(following)));
    return new PrefixKeys(head.length < LEAST_BYTES ? own : digest(shared), own);
  }

  private static String text(ChatMessage message) {
    StringBuilder text = new StringBuilder();
    text.append(message.getRoleValue()).append('\0').append(message.getContent());
    for (ContentPart part : message.getContentParts().getPartsList()) {
      text.append(part.getText());
    }
    return text.append('\0').toString();
  }

  private static byte[] cut(String text) {
    byte[] whole = text.getBytes(StandardCharsets.UTF_8);
    return whole.length > CHAT_BYTES ? Arrays.copyOf(whole, CHAT_BYTES) : whole;
  }

  private static byte[] bigEndian(List<Integer> ids) {
    ByteArrayOutputStream made = new ByteArrayOutputStream(4 * ids.size());
    try (DataOutputStream out = new DataOutputStream(made)) {
      for (int id : ids) {
        out.writeInt(id);
      }
    } catch (IOException impossible) {
      throw new UncheckedIOException(impossible);
    }
    return made.toByteArray();
  }

  private static byte[] joined(byte[] a, byte[] b) {
    byte[] made = Arrays.copyOf(a, a.length + b.length);
    System.arraycopy(b, 0, made, a.length, b.length);
    return made;
  }

  /** How much a key prefers an instance: digests in hexadecimal are in the order of their bytes. */
  static String rank(String key, String instance) {
    return digest(joined(HexFormat.of().parseHex(key), instance.getBytes(StandardCharsets.UTF_8)));
  }

  private static String digest(byte[] data) {
    try {
      byte[] sum = MessageDigest.getInstance("SHA-256").digest(data);
      return HexFormat.of().formatHex(sum, 0, 8);
    } catch (NoSuchAlgorithmException impossible) {
      throw new IllegalStateException(impossible); // each Java has it
    }
  }
}
