"""Converts between protobuf and the plain dataclasses of the engine and of delivery. No other
package depends on both.

    GenerationSpec ──▶ incoming, unsupported, inputs, sampling, Converter ──▶ Submission
    ResultEvent ◀── response.Responder ◀── delivery.events

`incoming` checks the size of a message and the capabilities that it requires. `unsupported` refuses
fields that this server does not support yet. `inputs` makes token ids, `sampling` makes the
sampling parameters and the output's grammar, and `converter` does the rest. `model` describes the
model. Errors name fields by their path in the spec; `service.errors.status_table` prefixes the path
of the spec in its message.
"""
