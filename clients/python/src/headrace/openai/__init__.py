"""OpenAI's HTTP API in front of Headrace servers: `headrace openai`.

The door is a client of the contract, in a process of its own: an HTTP body becomes a request of it
(`fields`, `asked`), goes to a server on the session of its caller (`callers`), and what comes back
becomes OpenAI's objects (`replies`). The servers lay out prompts, parse replies and count tokens;
here is no tokenizer and no model. It needs the packages of the extra `headrace[openai]`.
"""
