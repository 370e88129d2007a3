"""The RPC methods: they check and convert, call delivery, and raise domain errors
(`service.errors.status_table` maps them).
"""
