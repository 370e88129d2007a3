/**
 * Which capabilities a request needs: read from the marks of the contract's fields. Those that a message sets are listed
 * by name in its `required_capabilities`, so that a server that lacks one refuses the message, even if it does not know
 * the field.
 *
 * @module
 */
import type { DescField, DescMessage, Message } from "@bufbuild/protobuf";
import { getOption, hasOption } from "@bufbuild/protobuf";
import { reflect, type ReflectMessage } from "@bufbuild/protobuf/reflect";

import { capability, value_capability } from "./gen/headrace/v1/capability_pb.js";

/** A marked field: its own capability, those of its enum's values, and whether its messages have marks. */
interface Mark {
  field: DescField;
  name: string;
  values: ReadonlyMap<number, string>;
  inner: boolean;
}

const marksOf = new WeakMap<DescMessage, readonly Mark[]>();

/** Fills in the capabilities that a request of the contract needs; returns the request. */
export function withCapabilities<T extends Message & { requiredCapabilities: string[] }>(
  schema: DescMessage,
  request: T,
): T {
  const found = new Set(request.requiredCapabilities);
  collect(reflect(schema, request), found);
  request.requiredCapabilities = [...found].sort();
  return request;
}

function collect(message: ReflectMessage, into: Set<string>): void {
  for (const { field, name, values, inner } of marks(message.desc)) {
    if (!message.isSet(field)) {
      continue;
    }
    if (name !== "") {
      into.add(name);
    }
    for (const number of values.size > 0 ? numbersOf(message, field) : []) {
      const value = values.get(number);
      if (value !== undefined) {
        into.add(value);
      }
    }
    for (const one of inner ? messagesOf(message, field) : []) {
      collect(one, into);
    }
  }
}

function numbersOf(message: ReflectMessage, field: DescField): Iterable<number> {
  const value: unknown = message.get(field);
  return (field.fieldKind === "list" ? value : [value]) as Iterable<number>;
}

function messagesOf(message: ReflectMessage, field: DescField): Iterable<ReflectMessage> {
  const value: unknown = message.get(field);
  return (field.fieldKind === "list" ? value : [value]) as Iterable<ReflectMessage>;
}

function marks(desc: DescMessage): readonly Mark[] {
  const known = marksOf.get(desc);
  if (known !== undefined) {
    return known;
  }
  const found = desc.fields.flatMap((field) => {
    const name = hasOption(field, capability) ? getOption(field, capability) : "";
    const mark = { field, name, values: markedValues(field), inner: hasMarks(field) };
    return name !== "" || mark.values.size > 0 || mark.inner ? [mark] : [];
  });
  marksOf.set(desc, found);
  return found;
}

function markedValues(field: DescField): ReadonlyMap<number, string> {
  const values = field.enum?.values ?? [];
  return new Map(
    values.flatMap((value) =>
      hasOption(value, value_capability) ? [[value.number, getOption(value, value_capability)] as const] : [],
    ),
  );
}

/** No message of the contract contains itself. */
function hasMarks(field: DescField): boolean {
  const kind = field.fieldKind === "map" ? undefined : field.message;
  return kind !== undefined && kind.typeName.startsWith("headrace.") && marks(kind).length > 0;
}
