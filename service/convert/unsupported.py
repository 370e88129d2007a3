"""Fields of the contract that this server does not do yet: refused with UNIMPLEMENTED, by name,
when they ask for it.

A field that is set to its neutral value asks for nothing and passes.
"""

from __future__ import annotations

from headrace.v1 import generation_pb2

from engine.errors import UnsupportedFeatureError

_NOT_YET = "is not supported by this server yet; leave it out"


def refuse_unsupported(spec: generation_pb2.GenerationSpec) -> None:
    """Refuse what is not done yet.

    Raises:
        UnsupportedFeatureError: with the field's path in the spec.
    """
    sampling, output = spec.sampling, spec.output
    asked = (
        (spec.HasField("n") and spec.n != 1, "n"),
        (bool(spec.adapter), "adapter"),
        (spec.HasField("structured_output"), "structured_output"),
        (sampling.HasField("typical_p") and sampling.typical_p != 1.0, "sampling.typical_p"),
        (sampling.no_repeat_ngram_size != 0, "sampling.no_repeat_ngram_size"),
        (bool(sampling.allowed_token_ids), "sampling.allowed_token_ids"),
        (bool(sampling.banned_token_ids), "sampling.banned_token_ids"),
        (output.HasField("prompt_logprobs"), "output.prompt_logprobs"),
        (bool(output.logprob_token_ids), "output.logprob_token_ids"),
        (spec.scheduling.priority != 0, "scheduling.priority"),
    )
    for wanted, field in asked:
        if wanted:
            raise UnsupportedFeatureError(field, _NOT_YET)
