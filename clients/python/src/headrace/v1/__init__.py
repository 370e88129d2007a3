"""The generated stubs of the contract `headrace.v1`.

Everything else in this package is written by `make protos`.
"""
