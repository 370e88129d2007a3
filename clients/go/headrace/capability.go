package headrace

import (
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	headracev1 "headrace.dev/go/headrace/v1"
)

// A mark says what a field needs: its own capability, those of its enum's values, and whether its messages have marks.
type mark struct {
	name   string
	values map[protoreflect.EnumNumber]string
	inner  bool
}

var marksOf sync.Map // of a message's full name: its marked fields by number; read from the contract once

// requiredBy lists the capabilities that a message needs, with those that the caller named: what it sets that not every
// server has is marked in the contract, and a server that lacks one refuses the message instead of ignoring it.
func requiredBy(message proto.Message, named ...string) []string {
	found := slices.Clone(named)
	collect(message.ProtoReflect(), &found)
	slices.Sort(found)
	return slices.Compact(found)
}

func collect(message protoreflect.Message, found *[]string) {
	marks := marksIn(message.Descriptor())
	if len(marks) == 0 {
		return
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		one, marked := marks[field.Number()]
		if !marked {
			return true
		}
		if one.name != "" {
			*found = append(*found, one.name)
		}
		for single := range singles(field, value) {
			if name := one.values[enumOf(field, single)]; name != "" {
				*found = append(*found, name)
			}
			if one.inner {
				collect(single.Message(), found)
			}
		}
		return true
	})
}

// singles gives a field's values: one, or those of its list.
func singles(field protoreflect.FieldDescriptor, value protoreflect.Value) func(yield func(protoreflect.Value) bool) {
	return func(yield func(protoreflect.Value) bool) {
		if !field.IsList() {
			yield(value)
			return
		}
		for i := range value.List().Len() {
			if !yield(value.List().Get(i)) {
				return
			}
		}
	}
}

func enumOf(field protoreflect.FieldDescriptor, value protoreflect.Value) protoreflect.EnumNumber {
	if field.Kind() != protoreflect.EnumKind {
		return -1
	}
	return value.Enum()
}

func marksIn(message protoreflect.MessageDescriptor) map[protoreflect.FieldNumber]mark {
	if kept, known := marksOf.Load(message.FullName()); known {
		return kept.(map[protoreflect.FieldNumber]mark)
	}
	marks := make(map[protoreflect.FieldNumber]mark)
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		one := mark{name: extension(field.Options(), headracev1.E_Capability)}
		if enum := field.Enum(); enum != nil {
			one.values = make(map[protoreflect.EnumNumber]string)
			for j := range enum.Values().Len() {
				value := enum.Values().Get(j)
				if name := extension(value.Options(), headracev1.E_ValueCapability); name != "" {
					one.values[value.Number()] = name
				}
			}
		}
		if inner := field.Message(); inner != nil && !field.IsMap() && inner.ParentFile().Package() == message.ParentFile().Package() {
			one.inner = len(marksIn(inner)) > 0 // no message of the contract contains itself
		}
		if one.name != "" || len(one.values) > 0 || one.inner {
			marks[field.Number()] = one
		}
	}
	marksOf.Store(message.FullName(), marks)
	return marks
}

func extension(options proto.Message, kind protoreflect.ExtensionType) string {
	name, _ := proto.GetExtension(options, kind).(string)
	return name
}
