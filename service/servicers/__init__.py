"""The RPC methods: they check and convert, call delivery, and raise domain errors
(`service.errors.status_table` maps them).

Besides `convert`, `gateway` and the wiring, only they import generated code. How a call was let in,
they do not know.
"""
