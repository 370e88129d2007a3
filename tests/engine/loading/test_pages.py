"""Pages that are given back: those of one tensor, and no other's."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from engine.loading.pages import Pages
from tests.tiny_models import make_model

PAGE = mmap.PAGESIZE // 4
"""Numbers of float32 in a page."""


def _numbers(pages: int) -> torch.Tensor:
    return torch.ones(pages * PAGE)


def test_whole_pages_go_and_nothing_else() -> None:
    memory = _numbers(10)
    skipped = -memory.data_ptr() % mmap.PAGESIZE // 4
    aligned = memory[skipped : skipped + 9 * PAGE]
    before, middle, after = (
        aligned[: PAGE + 5],
        aligned[PAGE + 5 : 6 * PAGE - 3],
        aligned[6 * PAGE :],
    )
    pages = Pages((before, middle, after))
    assert pages.give_back(middle) == 3 * mmap.PAGESIZE
    assert before.eq(1).all()
    assert after.eq(1).all()
    assert middle[: PAGE - 5].eq(1).all(), "of a page that is not its alone"
    assert not middle[PAGE - 5 : 4 * PAGE - 5].any()
    assert middle[4 * PAGE - 5 :].eq(1).all()


def test_what_others_share_stays() -> None:
    memory = _numbers(9)[:-PAGE]  # not all of its storage
    for tensors in (
        (memory, memory.detach()),
        (memory, memory[5 * PAGE :]),
        (memory, memory[PAGE : PAGE + 1]),
        (memory, memory[:: 3 * PAGE]),
    ):
        assert Pages(tensors).give_back(memory) == 0
    strided = memory.view(2, -1).T
    assert Pages((strided,)).give_back(strided) == 0
    assert Pages((memory[:3],)).give_back(memory[:3]) == 0, "less than a page"
    assert memory.eq(1).all()
    assert Pages((memory,)).give_back(memory) >= 7 * mmap.PAGESIZE, "nobody else's"


_LOAD = """
import re, sys
from pathlib import Path
import torch
from engine.contract.config import LoadConfig
from engine.loading.loader import load_model

def bytes_of(name):
    # Not getrusage: what it calls the maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+)", status)[1])

torch.cpu._is_amx_tile_supported = lambda: False  # it would be packed by oneDNN
options = LoadConfig(threads=1, dtype="bfloat16")
load_model(sys.argv[1], options, lambda line: None)  # what is imported by and by
before = bytes_of("VmRSS")
model = load_model(sys.argv[2], options, lambda line: None)
print(bytes_of("VmHWM") - before, model.parameters * 2)
"""


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "layers"),
    [(torch.bfloat16, 512, 6), (torch.float16, 60_000, 2)],
    ids=["packed", "converted"],
)
def test_a_model_is_packed_without_being_held_twice(
    tmp_path: Path, dtype: torch.dtype, vocabulary: int, layers: int
) -> None:
    """Nor is a weight, such as a large embedding, that is converted before."""

    def save(name: str, hidden: int, layers: int, vocabulary: int = 512) -> str:
        config = Qwen3Config(
            vocab_size=vocabulary,
            tie_word_embeddings=True,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=256,
        )
        make_model(config, 0).to(dtype).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    folders = save("small", 64, 1), save("large", 1024, layers, vocabulary)
    command = [sys.executable, "-c", _LOAD, *folders]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    more, weights = map(int, result.stdout.split())
    assert weights > 150e6
    assert more < 1.4 * weights
