"""Protobuf on one side, the engine's and delivery's plain dataclasses on the other: the only place
that knows both.

    GenerationSpec ──▶ unknown, unsupported, inputs, sampling, request.Converter ──▶ Submission
    ResultEvent ◀── response.Responder ◀── delivery.events

`unknown` refuses fields that this server was not built with, `unsupported` those that it does not
do yet, `inputs` makes token ids, `sampling` the sampling parameters and the output's form, and
`request` the rest. `model` describes the model. Errors name fields by their path in the spec;
`service.status_table` completes them with the path of the spec in its message.
"""
