"""The generated stubs of the contract `headrace.v1`. Everything else here is written by `make protos`."""
