"""The ideal schedule's arithmetic, on a shape whose numbers can be done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.floors import Rates, Shape, ideal, read_shape
from benchmarks.models import DEMO
from benchmarks.workloads import Lengths

SHAPE = Shape(
    linear_parameters=1000,
    head_parameters=100,
    other_parameters=10,
    vocab_size=50,
    max_tokens=64,
    attention_width=4,
    kv_width=6,
)
BANDWIDTH_BOUND = Rates(bandwidth=1.0, matrix=1e12)
MATRIX_BOUND = Rates(bandwidth=1e12, matrix=1.0)


def test_bytes_of_weights_and_kv() -> None:
    assert SHAPE.weight_bytes("bfloat16") == 2220
    assert SHAPE.weight_bytes("float32") == 4440
    assert SHAPE.kv_bytes("bfloat16") == 12


def test_a_request_alone_reads_the_weights_and_its_kv_once_a_step() -> None:
    floor = ideal([Lengths(5, 3)], None, SHAPE, "bfloat16", BANDWIDTH_BOUND)
    assert floor.steps == 2  # the prompt gives the first of three tokens
    assert floor.decode_s == pytest.approx(2 * 2220 + (5 + 6) * 12)
    assert floor.prefill_s == pytest.approx(0.0, abs=1e-6)


def test_requests_that_run_together_share_the_weights() -> None:
    floor = ideal([Lengths(5, 3), Lengths(7, 2)], None, SHAPE, "bfloat16", BANDWIDTH_BOUND)
    assert floor.steps == 2
    assert floor.decode_s == pytest.approx((2220 + (5 + 7) * 12) + (2220 + 6 * 12))


def test_a_closed_loop_takes_the_next_request_as_one_ends() -> None:
    one_by_one = ideal([Lengths(5, 3)] * 3, 1, SHAPE, "bfloat16", BANDWIDTH_BOUND)
    alone = ideal([Lengths(5, 3)], None, SHAPE, "bfloat16", BANDWIDTH_BOUND)
    assert one_by_one.steps == 6
    assert one_by_one.decode_s == pytest.approx(3 * alone.decode_s)
    # two places: the third request joins when the short one has ended
    floor = ideal(
        [Lengths(5, 2), Lengths(5, 4), Lengths(5, 3)], 2, SHAPE, "bfloat16", BANDWIDTH_BOUND
    )
    assert floor.steps == 3


def test_a_prompt_costs_its_operations_and_one_position_of_logits() -> None:
    floor = ideal([Lengths(3, 1)], None, SHAPE, "bfloat16", MATRIX_BOUND)
    assert floor.steps == 0
    assert floor.prefill_s == pytest.approx(2 * 1000 * 3 + 4 * 4 * (1 + 2 + 3) + 2 * 100)


def test_a_step_of_many_requests_is_bound_by_its_operations() -> None:
    floor = ideal([Lengths(5, 2)] * 8, None, SHAPE, "bfloat16", MATRIX_BOUND)
    assert floor.decode_s == pytest.approx(8 * (2 * 1000 + 4 * 4 * 6 + 2 * 100))


def test_a_shared_prefix_is_computed_and_read_once() -> None:
    lengths = [Lengths(10, 2, shared_prefix=8)] * 3
    prefill = ideal(lengths, None, SHAPE, "bfloat16", MATRIX_BOUND).prefill_s
    first = SHAPE.prompt_flops(0, 10)
    assert prefill == pytest.approx(first + 2 * SHAPE.prompt_flops(8, 10))
    decode = ideal(lengths, None, SHAPE, "bfloat16", BANDWIDTH_BOUND).decode_s
    assert decode == pytest.approx(2220 + (8 + 3 * 2) * 12)


def test_the_demo_models_shape_is_read_from_its_files() -> None:
    shape = read_shape(DEMO)
    assert (shape.vocab_size, shape.max_tokens) == (4096, 2048)
    assert shape.head_parameters == 4096 * 256  # tied
    assert shape.linear_parameters == 5 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 704)
    assert shape.other_parameters == 5 * 2 * 256 + 256
    assert shape.attention_width == 5 * 8 * 32
    assert shape.kv_width == 2 * 5 * 4 * 32


def test_an_untied_embedding_is_not_read_and_the_head_is(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 10,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": torch.zeros(10, 4),
            "lm_head.weight": torch.zeros(10, 4),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4),
            "model.norm.weight": torch.zeros(4),
        },
        tmp_path / "model.safetensors",
    )
    shape = read_shape(tmp_path)
    assert (shape.linear_parameters, shape.head_parameters, shape.other_parameters) == (24, 40, 4)
    assert (shape.attention_width, shape.kv_width) == (4, 8)


def test_a_mixture_of_experts_has_no_floor_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8}))
    with pytest.raises(ValueError, match="dense decoders only"):
        read_shape(tmp_path)


def test_states_are_read_and_written_once_a_step_and_their_layers_have_no_kv(
    tmp_path: Path,
) -> None:
    config = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "vocab_size": 10,
        "max_position_embeddings": 8,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    assert (shape.attention_width, shape.kv_width, shape.state_width) == (4, 8, 60)
    floor = ideal([Lengths(5, 2)] * 2, None, shape, "bfloat16", BANDWIDTH_BOUND)
    assert floor.decode_s == pytest.approx(24 * 2 + 2 * (5 * 16 + 2 * 4 * 60))
    assert shape.prompt_flops(0, 2) == 2 * (2 * 24 + 6 * 60) + 4 * 4 * 3


def test_what_has_no_floor_is_said(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "layer_types": ["conv"],
        "vocab_size": 10,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layers of conv"):
        read_shape(tmp_path)
    config["layer_types"] = ["linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="linear_num_value_heads, linear_key_head_dim"):
        read_shape(tmp_path)
