"""The RPC methods: they check and convert, call delivery, and raise domain errors
(`service.errors.status_table` maps them).

Besides `convert`, `gateway` and the wiring, only this package imports generated code. It does not
know how a call was authorised.
"""
