"""`vllm.grpc.engine.VllmEngine`: the service through which gateways such as smg and llm-d call
engines.

    gateway ── Generate(token ids) ─▶ generate_request ─▶ GenerateStreamRequest ─▶ start_request
            ◀── chunks, completes ─── generate_response ◀─ events ◀─────────────── ResultStream

The service is off by default (`--gateway`), and its stubs are an optional extra. Only `servicer`
and `generate_response` import them, and `service.server` imports those modules when the option is
set. A request is translated to a message of our own contract and then handled like any other, so
admission, accounts, limits, delivery and errors are the same. If a request asks for something that
this server does not support, it is refused with an error that names the field.
"""
