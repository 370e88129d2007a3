"""Tiny random models that write in a family's format: a tokenizer with the format's marks, a chat
template, and a real engine behind a real server. Such a model says nothing by itself: whatever it
does right, it is held to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from headrace import AsyncClient
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.replies import FORMATS
from service.server import HeadraceServer
from tests.tiny_models import make_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ tools | tojson if tools else '' }}assistant:"
)
CONTEXT = 4096


def make_directory(
    path: Path,
    format: str,
    *,
    template: str = TEMPLATE,
    special: Sequence[str] | None = None,
    added: Sequence[str] = (),
) -> Path:
    """A model's directory. `special`: the special tokens besides the end of the sequence; None: all
    marks of the format that may be. `added`: tokens that are not special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("t", "h"), ("<", "/"), ("Ċ", "<")]
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    for a, b in pairs:
        vocabulary.setdefault(a + b, len(vocabulary))
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    form = FORMATS[format].form
    plain = () if form is None else form.plain
    marks = sorted(FORMATS[format].marks - set(plain)) if special is None else list(special)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<eos>", *marks)])
    backend.add_tokens([AddedToken(text, special=False) for text in added])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    whole.chat_template = template
    whole.save_pretrained(path)
    eos = whole.convert_tokens_to_ids("<eos>")
    config = LlamaConfig(
        vocab_size=len(whole),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=eos,
    )
    model = make_model(config)
    with torch.no_grad():  # no token is much likelier than the others, so that outputs differ
        model.get_output_embeddings().weight.mul_(0.05)
    model.save_pretrained(path)
    return path


@asynccontextmanager
async def calling(directory: Path, format: str, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client of a server of this model."""
    batching = ContinuousBatchingConfig(
        block_size=32, num_blocks=2048, max_requests_per_batch=64, allow_block_sharing=True
    )
    engine = LocalEngineClient(str(directory), batching, LoadConfig(device="cpu", threads=1))
    config = ServiceConfig(listen=("127.0.0.1:0",), reply_parser=format, **options)
    server = HeadraceServer(config, engine, progress=lambda line: None)
    await server.start()
    try:
        await server.ready()
        async with AsyncClient(server.addresses[0]) as client:
            yield client
    finally:
        await server.stop()
