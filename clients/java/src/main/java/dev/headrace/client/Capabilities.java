package dev.headrace.client;

import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.EnumValueDescriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import dev.headrace.v1.CapabilityProto;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;

/**
 * The capabilities that a message needs: what it sets that not every server has is marked in the
 * contract, and a server that lacks one refuses the message instead of ignoring it.
 */
final class Capabilities {
  private Capabilities() {}

  /**
   * What a field needs: its own capability, those of its enum's values, and whether it has more.
   */
  private record Mark(String name, Map<Integer, String> values, boolean inner) {}

  private static final Map<Descriptor, Map<FieldDescriptor, Mark>> MARKS =
      new ConcurrentHashMap<>();

  /** Those that a message needs, with those that were named before; sorted, each once. */
  static Collection<String> of(Message message, List<String> named) {
    TreeSet<String> found = new TreeSet<>(named);
    collect(message, found);
    return found;
  }

  private static void collect(Message message, TreeSet<String> found) {
    Map<FieldDescriptor, Mark> marks = marks(message.getDescriptorForType());
    if (marks.isEmpty()) {
      return;
    }
    for (Map.Entry<FieldDescriptor, Object> set : message.getAllFields().entrySet()) {
      Mark mark = marks.get(set.getKey());
      if (mark == null) {
        continue;
      }
      if (!mark.name.isEmpty()) {
        found.add(mark.name);
      }
      List<?> values =
          set.getKey().isRepeated() ? (List<?>) set.getValue() : List.of(set.getValue());
      for (Object value : values) {
        if (value instanceof EnumValueDescriptor told
            && mark.values.containsKey(told.getNumber())) {
          found.add(mark.values.get(told.getNumber()));
        } else if (mark.inner && value instanceof Message inner) {
          collect(inner, found);
        }
      }
    }
  }

  private static Map<FieldDescriptor, Mark> marks(Descriptor message) {
    Map<FieldDescriptor, Mark> known = MARKS.get(message);
    if (known != null) {
      return known;
    }
    Map<FieldDescriptor, Mark> made = new HashMap<>();
    for (FieldDescriptor field : message.getFields()) {
      String name = field.getOptions().getExtension(CapabilityProto.capability);
      Map<Integer, String> values = new HashMap<>();
      boolean inner = false;
      if (field.getJavaType() == FieldDescriptor.JavaType.ENUM) {
        for (EnumValueDescriptor value : field.getEnumType().getValues()) {
          String needed = value.getOptions().getExtension(CapabilityProto.valueCapability);
          if (!needed.isEmpty()) {
            values.put(value.getNumber(), needed);
          }
        }
      } else if (field.getJavaType() == FieldDescriptor.JavaType.MESSAGE
          && !field.isMapField()
          && field.getMessageType().getFile().getPackage().equals(message.getFile().getPackage())) {
        inner = !marks(field.getMessageType()).isEmpty(); // none of the contract contains itself
      }
      if (!name.isEmpty() || !values.isEmpty() || inner) {
        made.put(field, new Mark(name, Map.copyOf(values), inner));
      }
    }
    MARKS.put(message, Map.copyOf(made));
    return made;
  }
}
