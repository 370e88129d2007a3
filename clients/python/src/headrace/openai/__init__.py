"""OpenAI's HTTP API in front of Headrace servers: `headrace openai`.

The gateway (`Door`) is a client of the contract and runs in a separate process. An HTTP body
becomes a request of the contract (`fields`, `asked`) and goes to a server on its caller's session
(`callers`). The results become OpenAI's objects (`replies`). The servers render prompts, parse
replies and count tokens; the gateway has no tokenizer and no model. It needs the packages of the
extra `headrace[openai]`.
"""
