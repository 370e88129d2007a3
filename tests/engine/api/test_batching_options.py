"""One config of all that callers may say of continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CompileConfig, GenerationConfig
from transformers.generation import ContinuousBatchingConfig as TransformersConfig

from engine.api.batching_options import resolve_config
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError, InvalidRequestError

DEFAULT = ContinuousBatchingConfig(block_size=8, num_blocks=7)


def resolve(given: object = None, generation: Any = None, **options: Any) -> Any:
    return resolve_config(generation or GenerationConfig(), given, DEFAULT, options)


def test_the_default_where_nothing_is_said() -> None:
    assert resolve() is DEFAULT or resolve() == DEFAULT


def test_given_before_the_default_and_keywords_before_given() -> None:
    given = ContinuousBatchingConfig(block_size=16)
    assert resolve(given) == given
    assert resolve(given, num_blocks=3) == ContinuousBatchingConfig(block_size=16, num_blocks=3)
    with pytest.raises(ConfigError, match="num_blocks"):
        resolve(given, num_blocks=0)
    with pytest.raises(InvalidRequestError, match="block_sise"):
        resolve(block_sise=3)


def test_options_on_the_generation_config_as_in_older_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generation = GenerationConfig(max_batch_tokens=512, use_cuda_graph=False)
    config = resolve(generation=generation)
    assert config.max_batch_tokens == 512
    assert config.use_cuda_graph is False
    assert config.num_blocks == 7
    assert resolve(generation=generation, max_batch_tokens=64).max_batch_tokens == 64
    assert not caplog.records
    given = ContinuousBatchingConfig(block_size=16)
    assert resolve(given, generation) == given
    assert "max_batch_tokens, use_cuda_graph is not used" in caplog.text


def test_a_requests_seed_is_not_the_engines() -> None:
    assert resolve(generation=GenerationConfig(seed=4)).seed is None


def test_a_config_inside_the_generation_config() -> None:
    generation = GenerationConfig()
    generation.continuous_batching_config = ContinuousBatchingConfig(block_size=16)
    assert resolve(generation=generation).block_size == 16


def test_transformers_own_config() -> None:
    # Versions differ in what they call it.
    size = "page_size" if hasattr(TransformersConfig, "page_size") else "block_size"
    config = resolve(
        TransformersConfig(
            **{size: 32},
            num_blocks=40,
            allow_block_sharing=False,
            scheduler_type="prefill_first",
        )
    )
    assert (config.block_size, config.num_blocks) == (32, 40)
    assert config.allow_block_sharing is False
    assert config.scheduler_type == "prefill_first"
    if hasattr(TransformersConfig, "cpu_group_timeout"):
        with pytest.raises(ConfigError, match="cpu_group_timeout"):
            resolve(TransformersConfig(cpu_group_timeout=1.0))
    with pytest.raises(ConfigError, match="must be a ContinuousBatchingConfig"):
        resolve({"block_size": 3})


def test_the_generation_configs_compile_config_fills_gaps() -> None:
    mine, common = CompileConfig(dynamic=True), CompileConfig()
    generation = GenerationConfig(compile_config=common)
    config = resolve(ContinuousBatchingConfig(varlen_compile_config=mine), generation)
    assert config.varlen_compile_config is mine
    assert config.decode_compile_config is common
