"""On a CUDA device without Triton, attention is computed by torch; decode steps are captured then
too.
"""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import StaticShape
from engine.attention.torch_backend import TorchAttentionBackend
from engine.runner.device import CudaDevice
from engine.runner.forward import ModelForward
from engine.runner.runner_options import StepPath
from engine.runner.static_inputs import StaticInputs
from tests.engine.cuda.launches import BLOCK, REQUESTS, by_transformers, cache_of
from tests.engine.cuda.watch import CUDA, Watch, fake_cuda
from tests.model_recipes import RECIPES


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_step_in_torch_can_be_captured(family: str, is_decode: bool) -> None:
    """With windows, softcaps and sinks: it neither waits nor copies."""
    served, watch = by_transformers(RECIPES[family]), Watch()
    tokens = REQUESTS if is_decode else 3 * REQUESTS
    shape = StaticShape(is_decode, tokens, REQUESTS, 4 * BLOCK, BLOCK)
    with fake_cuda(watch), torch.inference_mode():
        served.move()
        kv, backend = cache_of(served.shapes), TorchAttentionBackend()
        assert backend.fits_static(shape)
        inputs = StaticInputs(shape, backend, kv, CudaDevice(CUDA), 1)
        forward = ModelForward(served.model, kv, backend)
        path = StepPath.DECODE if is_decode else StepPath.VARLEN
        with watch.watching(allows_copies=False):
            logits = forward(
                path, inputs.token_ids, inputs.positions, inputs.logit_rows, inputs.metadata()
            )
    assert logits.shape[0] == REQUESTS
    assert logits.device == CUDA
