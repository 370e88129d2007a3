"""`vllm.grpc.engine.VllmEngine`: the service that gateways such as smg and llm-d call engines by.

    gateway ── Generate(token ids) ─▶ generate_request ─▶ GenerateStreamRequest ─▶ start_request
            ◀── chunks, completes ─── generate_response ◀─ events ◀─────────────── ResultStream

It is off by default (`--gateway`), and its stubs are an optional extra: only `servicer` and
`generate_response` import them, and `service.server` imports those when the option is set. A
request is translated to a message of our own contract and then goes the way of any other, so
admission, accounts, limits, delivery and errors are the same. What the protocol asks for and this
server cannot do is refused, by the name of the field.
"""
