"""A contract that is newer than ours by a field without and one with a capability, a value of an
enum and a member of a oneof: what a rolling update brings together with ours.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from google.protobuf import descriptor_pb2
from headrace.v1 import capability_pb2, generation_pb2

_V1 = Path(generation_pb2.__file__).parent
_NUMBERS = iter(range(2000, 2100))


def newer_package(folder: Path) -> Path:
    """A copy of the Python client's package, its contract the newer one: for PYTHONPATH."""
    shutil.copytree(_V1.parent, folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / "headrace" / "v1" / "generation_pb2.py"
    literal = re.compile(r"AddSerializedFile\(b'.*'\)")
    source, count = literal.subn(
        lambda _: f"AddSerializedFile({_newer().SerializeToString()!r})", place.read_text()
    )
    assert count == 1
    # What follows for other runtimes speaks of offsets in the older contract.
    place.write_text(source[: source.index("if not _descriptor._USE_C_DESCRIPTORS")])
    return folder


def _newer() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto.FromString(generation_pb2.DESCRIPTOR.serialized_pb)
    [spec] = [one for one in file.message_type if one.name == "GenerationSpec"]
    kinds = descriptor_pb2.FieldDescriptorProto
    _add(spec, "hint", kinds.TYPE_STRING)
    _mark(_add(spec, "arrive_before", kinds.TYPE_UINT32), "time_travel")
    hologram = _add(spec, "hologram", kinds.TYPE_BYTES)
    hologram.oneof_index = next(
        index for index, one in enumerate(spec.oneof_decl) if one.name == "input"
    )
    _mark(hologram, "holograms")
    [role] = [one for one in file.enum_type if one.name == "ChatRole"]
    oracle = role.value.add(name="CHAT_ROLE_ORACLE", number=99)
    oracle.options.Extensions[capability_pb2.value_capability] = "oracles"
    return file


def _add(
    message: descriptor_pb2.DescriptorProto,
    name: str,
    kind: descriptor_pb2.FieldDescriptorProto.Type.ValueType,
) -> descriptor_pb2.FieldDescriptorProto:
    return message.field.add(
        name=name,
        json_name=name,
        number=next(_NUMBERS),
        type=kind,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    )


def _mark(field: descriptor_pb2.FieldDescriptorProto, capability: str) -> None:
    field.options.Extensions[capability_pb2.capability] = capability
