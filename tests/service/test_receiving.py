"""How large a message may be where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.receiving import default_receive_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ('{"max_position_embeddings": 2048}', MIB),
        ('{"max_position_embeddings": 262144}', 2 * MIB),
        ('{"text_config": {"max_position_embeddings": 1048576}}', 8 * MIB),
        ('{"n_positions": 262144}', 2 * MIB),
        ('{"max_position_embeddings": "many"}', MIB),
        ("[1]", MIB),
        ("{", MIB),
        ("[" * 100_000, MIB),
        (None, MIB),
    ],
)
def test_it_comes_from_the_context_that_the_model_declares(
    tmp_path: Path, config: str | None, right: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert default_receive_bytes(str(tmp_path)) == right


@pytest.mark.parametrize("model", ["some-body/some-model-that-is-not-here", "/no/such/directory"])
def test_a_model_that_is_not_here_gets_room_for_a_long_context(model: str) -> None:
    assert default_receive_bytes(model) == 8 * MIB
