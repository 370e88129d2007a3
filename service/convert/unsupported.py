"""Fields of the contract that this server does not do yet: refused with UNIMPLEMENTED, by name,
when they ask for it.

A field that is set to its neutral value asks for nothing and passes.
"""

from __future__ import annotations

from headrace.v1 import generation_pb2

from service.call_errors import UnsupportedFieldError

_NOT_YET = "is not supported by this server yet; leave it out"


def refuse_unsupported(spec: generation_pb2.GenerationSpec, *, heeds_priorities: bool) -> None:
    """Refuse what is not done yet, and what this server's configuration leaves out.

    Raises:
        UnsupportedFieldError: with the field's path in the spec.
    """
    if spec.labels:
        raise UnsupportedFieldError("labels", _NOT_YET)
    if spec.adapter:
        raise UnsupportedFieldError("adapter", _NOT_YET)
    if spec.structured_output.WhichOneof("format") == "structural_tag":
        raise UnsupportedFieldError("structured_output.structural_tag", _NOT_YET)
    if spec.scheduling.priority != 0 and not heeds_priorities:
        raise UnsupportedFieldError(
            "scheduling.priority",
            "is not heeded by this server's scheduler (its option scheduler is neither fair nor "
            "priority); leave it out",
        )
