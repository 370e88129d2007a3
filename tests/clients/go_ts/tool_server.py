"""The real server around a fake engine that calls a tool, in Hermes' form: it asks for the gauges
of two places, and then says what it was told.

Run as a program it listens on a free TCP port and on the Unix socket that it is given, prints the
port, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from engine.contract.request import GenerationRequest
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import EOS, VOCAB_SIZE, FakeEngine, model_info
from tests.service.replies.templates import tokenizer

PLACES = ("Ulm", "Köln")
_CALL = '<tool_call>\n{{"name": "read_gauge", "arguments": {{"place": "{}"}}}}\n</tool_call>'
CALLS = "<think>\nI must look.\n</think>\n\nI look.\n" + "\n".join(map(_CALL.format, PLACES))


def ask_then_tell(request: GenerationRequest, _choice: int) -> Sequence[int]:
    """What the model says: the calls; then, once there are answers, these. If the calls are not in
    the prompt as they were, it says so. Asked to be cut, it goes on in a call until it is; asked to
    be broken, it ends in one, and then says what it was told.
    """
    prompt = tokenizer().decode(request.prompt, skip_special_tokens=False)
    _, asked, answers = prompt.partition("<|im_start|>tool\n")
    reply = CALLS
    if "cut" in prompt:
        return (tokenizer().encode(CALLS.removesuffix('"}}\n</tool_call>') + "n" * 4096))[:4096]
    if "broken" in prompt:
        ended = 'I heard that the arguments are no JSON object: {"place": "Köln'
        reply = ended if "no JSON object" in answers else CALLS.removesuffix('"}}\n</tool_call>')
    elif asked:
        told = asked + answers.removesuffix("<|im_start|>assistant\n")
        heard = told.replace("<|im_start|>tool\n", "").replace("<|im_end|>\n", "; ")
        reply = f"I heard {heard}" if CALLS in prompt else f"What is this? {prompt}"
    return [*tokenizer().encode(reply), EOS]


async def serve(unix_path: str) -> None:
    """Serves until the standard input ends."""
    engine = FakeEngine(script=ask_then_tell, info=model_info(vocab_size=VOCAB_SIZE + 16))
    server = HeadraceServer(
        ServiceConfig(listen=("127.0.0.1:0", f"unix:{unix_path}")),
        engine,
        tokenizer_loader=lambda _info: tokenizer(),
    )
    await server.start()
    await server.ready()
    sys.stdout.write(f"{next(a.port for a in server.bound if a.path is None)}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
