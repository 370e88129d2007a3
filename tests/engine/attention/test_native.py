"""The native kernels: equal to the reference in float64, for every shape that a model may have."""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import registry
from engine.attention.interface import AttentionBackend, AttentionParams, BatchLayout, LayerCache
from engine.attention.native_backend import NativeAttentionBackend
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError
from engine.loading import packing
from engine.loading.loader import load_model
from engine.native import build, library
from engine.native.library import NativeLibrary, NativeUnavailableError, load_library
from tests.tiny_models import FAMILIES, make_model

# Weights and outputs are rounded to the dtype once each; sums are float32.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


@pytest.fixture(scope="module")
def native() -> NativeLibrary:
    return load_library()


def make_layout(parts: list[tuple[int, int]], size: int, padding: int, seed: int) -> BatchLayout:
    """Requests of (start, count) whose blocks lie in no order."""
    parts = sorted(parts, key=lambda part: (part[1] > 1, part[0]))
    starts = np.array([start for start, _ in parts], dtype=np.int64)
    counts = np.array([count for _, count in parts], dtype=np.int64)
    lengths = -(-(starts + counts) // size)
    blocks = np.random.default_rng(seed).permutation(int(lengths.sum())) + 1
    tables = np.zeros((len(parts), int(lengths.max())), dtype=np.int32)
    for row, (length, end) in enumerate(zip(lengths, np.cumsum(lengths), strict=True)):
        tables[row, :length] = blocks[end - length : end]
    return BatchLayout(
        starts=starts,
        counts=counts,
        num_decodes=int((counts == 1).sum()),
        positions=np.concatenate([np.arange(s, s + c) for s, c in parts]),
        tables=tables,
        block_size=size,
        num_padding=padding,
    )


class Step:
    """One layer's step: its tensors, and what two backends make of them."""

    def __init__(
        self,
        layout: BatchLayout,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self._generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        tokens = int(layout.counts.sum()) + layout.num_padding
        slots = (int(layout.tables.max()) + 1) * layout.block_size
        self.keys = self._random(slots, num_kv_heads, dims[0])
        self.values = self._random(slots, num_kv_heads, dims[1])
        # As models make them: [1, T, H, D] with two axes exchanged.
        self.query = self._random(tokens, num_heads, dims[0]).transpose(0, 1)
        self.key = self._random(tokens, num_kv_heads, dims[0]).transpose(0, 1)
        self.value = self._random(tokens, num_kv_heads, dims[1]).transpose(0, 1)
        self.sinks = self._random(num_heads)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype)

    def run(
        self,
        backend: AttentionBackend,
        dtype: torch.dtype,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> tuple[torch.Tensor, LayerCache]:
        cache = LayerCache(self.keys.to(dtype, copy=True), self.values.to(dtype, copy=True), 0)
        params = AttentionParams(
            scaling=self.query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=self.sinks.to(dtype) if has_sinks else None,
        )
        output = backend.forward(
            self.query.to(dtype),
            self.key.to(dtype),
            self.value.to(dtype),
            cache,
            backend.prepare(self.layout, window, cache.keys),
            params,
        )
        return output, cache


parts = st.lists(
    st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(2, 90))),
    min_size=1,
    max_size=5,
)
heads = st.tuples(st.sampled_from([1, 2, 3, 4, 7, 8, 70]), st.sampled_from([1, 2, 3]))
dims = st.one_of(
    st.sampled_from([6, 8, 31, 32, 64, 80, 96, 128, 256]).map(lambda dim: (dim, dim)),
    st.sampled_from([(192, 128), (24, 16), (9, 40)]),
)


@settings(max_examples=150, deadline=None)
@given(
    parts=parts,
    heads=heads,
    dims=dims,
    dtype=st.sampled_from(list(TOLERANCES)),
    size=st.sampled_from([1, 4, 16, 256]),
    window=st.sampled_from([None, 1, 7, 100]),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
    padding=st.sampled_from([0, 3]),
)
def test_equals_the_reference(
    parts: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    padding: int,
    native: NativeLibrary,
) -> None:
    """heads: query heads to a key/value head, and key/value heads."""
    layout = make_layout(parts, size, padding, seed=len(parts))
    step = Step(layout, (heads[0] * heads[1], heads[1]), dims, dtype)
    options = {"window": window, "softcap": softcap, "has_sinks": has_sinks}
    expected, written = step.run(TorchAttentionBackend(), torch.float64, **options)  # type: ignore[arg-type]
    actual, cache = step.run(NativeAttentionBackend(native), dtype, **options)  # type: ignore[arg-type]
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[dtype])
    used = (layout.tables[:, :, None] * size + np.arange(size)).reshape(len(parts), -1)
    for row, end in enumerate((layout.starts + layout.counts).tolist()):
        slots = used[row, :end]
        assert torch.equal(cache.keys[slots].double(), written.keys[slots])
        assert torch.equal(cache.values[slots].double(), written.values[slots])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_request_is_the_same_among_any_neighbours(
    dtype: torch.dtype, native: NativeLibrary
) -> None:
    """To the last bit: where its work is cut depends on nobody else, nor on the threads."""
    backend = NativeAttentionBackend(native)
    alone = Step(make_layout([(700, 1)], 16, 0, 0), (4, 2), (64, 64), dtype)
    expected, _ = alone.run(backend, dtype)
    among = Step(make_layout([(700, 1)], 16, 0, 0), (4, 2), (64, 64), dtype)
    layout = make_layout([(700, 1)], 16, 0, 0)
    among.layout = BatchLayout(
        starts=np.array([700, 650, 0]),
        counts=np.array([1, 1, 40]),
        num_decodes=2,
        positions=np.concatenate([[700], [650], np.arange(40)]),
        tables=np.repeat(layout.tables, 3, axis=0) + np.array([[0], [44], [88]], dtype=np.int32),
        block_size=16,
    )
    for name, axis in (("keys", 0), ("values", 0), ("query", 1), ("key", 1), ("value", 1)):
        tensor = getattr(among, name)
        others = torch.randn_like(tensor.repeat_interleave(45, axis))
        setattr(among, name, torch.cat([tensor, others], axis))
    assert torch.get_num_threads() == 1
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            output, _ = among.run(backend, dtype)
            assert torch.equal(output[0], expected[0])
    finally:
        torch.set_num_threads(1)


@settings(max_examples=100, deadline=None)
@given(
    starts=st.lists(st.integers(0, 700), min_size=1, max_size=3),
    num_rows=st.integers(1, 11),
    heads=heads,
    dims=dims,
    dtype=st.sampled_from(list(TOLERANCES)),
    size=st.sampled_from([1, 4, 16, 256]),
    window=st.sampled_from([None, 7, 300]),
    threads=st.integers(1, 3),
)
def test_rows_that_share_their_context_are_the_same_as_alone(
    starts: list[int],
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    window: int | None,
    threads: int,
    native: NativeLibrary,
) -> None:
    """To the last bit: a request with drafts, and others that begin with its blocks. The last row
    of each has NaN as key and value, which those before it do not see.
    """
    shared = min(starts) // size  # blocks with which all of them begin
    ends = [-(-(start + num_rows) // size) for start in starts]
    tables = np.zeros((len(starts), max(ends)), dtype=np.int32)
    for row, end in enumerate(ends):
        tables[row, :end] = 1 + np.arange(end) + row * max(ends)
        tables[row, :shared] = 1 + np.arange(shared)
    every = np.repeat(starts, num_rows) + np.tile(np.arange(num_rows), len(starts))

    def layout(rows: slice) -> BatchLayout:
        count = len(every[rows])
        ones = np.ones(count, dtype=np.int64)
        table = np.repeat(tables, num_rows, axis=0)[rows]
        return BatchLayout(every[rows], ones, count, every[rows], table, size, 0)

    step = Step(layout(slice(None)), (heads[0] * heads[1], heads[1]), dims, dtype)
    if num_rows > 1:
        step.key[:, num_rows - 1 :: num_rows] = torch.nan
        step.value[:, num_rows - 1 :: num_rows] = torch.nan
    backend = NativeAttentionBackend(native)
    torch.set_num_threads(threads)
    try:
        output, written = step.run(backend, dtype, window)
    finally:
        torch.set_num_threads(1)
    step.keys, step.values = written.keys, written.values
    tokens = {name: getattr(step, name) for name in ("query", "key", "value")}
    for row in range(len(every)):
        if num_rows > 1 and (row + 1) % num_rows == 0:
            continue
        step.layout = layout(slice(row, row + 1))
        for name, tensor in tokens.items():
            setattr(step, name, tensor[:, row : row + 1])
        alone, _ = step.run(backend, dtype, window)
        assert torch.equal(alone[0], output[row])


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 5, 70)])
def test_what_earlier_owners_left_does_not_matter(
    counts: tuple[int, ...], native: NativeLibrary
) -> None:
    """Everything outside the requests' own tokens is NaN, and so is one request; the others do not
    notice.
    """
    layout = make_layout([(20 + i, count) for i, count in enumerate(counts)], 4, 0, 1)
    step = Step(layout, (4, 2), (16, 16), torch.bfloat16)
    backend = NativeAttentionBackend(native)
    expected, _ = step.run(backend, torch.bfloat16)
    own = np.zeros(len(step.keys), dtype=bool)
    for row in (1, 2):
        end = int(layout.starts[row] + layout.counts[row])
        own[(layout.tables[row][:, None] * 4 + np.arange(4)).reshape(-1)[:end]] = True
    step.keys[~own] = float("nan")
    step.values[~own] = float("nan")
    actual, _ = step.run(backend, torch.bfloat16)
    first = int(layout.counts[0])
    assert torch.isnan(actual[:first]).all(), "it shows in its own output"
    assert torch.equal(actual[first:], expected[first:])


def test_the_choice(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert isinstance(registry.choose_backend(cpu, torch.float32), NativeAttentionBackend)
    assert isinstance(registry.choose_backend(cpu, torch.float32, "torch"), TorchAttentionBackend)
    assert isinstance(registry.choose_backend(cpu, torch.float64), TorchAttentionBackend)
    assert "do not compute in torch.float64" in caplog.text
    cuda = torch.device("cuda")
    assert isinstance(registry.choose_backend(cuda, torch.float32), TorchAttentionBackend)
    with pytest.raises(ConfigError, match=r"attention: is native, but .* the device is cuda"):
        registry.choose_backend(cuda, torch.float32, "native")
    with pytest.raises(ConfigError, match="attention: is 'fast'; it must be one of auto, torch"):
        LoadConfig(attention="fast")  # type: ignore[arg-type]

    def missing() -> NativeLibrary:
        raise NativeUnavailableError("the native kernels were not built; build them")

    monkeypatch.setattr(registry, "load_library", missing)
    with caplog.at_level(logging.WARNING):
        chosen = registry.choose_backend(cpu, torch.float32)
    assert isinstance(chosen, TorchAttentionBackend)
    assert (
        "attention runs in torch, more slowly than it could: the native kernels were not built"
        in (caplog.text)
    )
    with pytest.raises(ConfigError, match="attention: is native, but the native kernels were not"):
        registry.choose_backend(cpu, torch.float32, "native")


def test_a_library_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NativeUnavailableError, match=r"were not built; .* -m engine\.native\.build`"
    ):
        load_library(tmp_path / "libheadrace.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailableError, match="cannot be loaded"):
        load_library(broken)
    monkeypatch.setattr(library, "fingerprint", lambda: "0" * 16)
    with pytest.raises(NativeUnavailableError, match="were built from other sources"):
        load_library()


def test_the_build_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--compiler", "no-such-compiler"]) == 1
    assert "no C++ compiler found (no-such-compiler)" in capsys.readouterr().err
    assert build.main(["--compiler", "no-such-compiler", "--optional"]) == 0
    assert "Headrace runs without them, more slowly" in capsys.readouterr().err
    (tmp_path / "library.cpp").write_text("this is not C++")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.BuildError, match="not C"):
        build.build(build.find_compiler(), tmp_path / "libheadrace.so")
    assert not (tmp_path / "libheadrace.so").exists()


def test_clang_is_refused_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it builds cannot be loaded: torch's OpenMP runtime has none of the calls that it makes.

    The stand-in tells of itself what clang tells; where there is a clang, it is asked, too.
    """
    clang = tmp_path / "c++"
    clang.write_text("#!/bin/sh\necho '#define __clang__ 1'\n")
    clang.chmod(0o755)
    assert build.main(["--compiler", str(clang)]) == 1
    assert "clang's OpenMP calls (__kmpc_*) are not in the runtime" in capsys.readouterr().err
    if shutil.which("clang++"):
        with pytest.raises(build.BuildError, match=r"clang\+\+ will not do: .*; install g\+\+"):
            build.find_compiler("clang++")
    gnu = Path(build.find_compiler()).parent
    monkeypatch.setenv("PATH", f"{tmp_path}:{gnu}")
    assert build.find_compiler() == str(gnu / "g++")  # though clang is the first c++
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"c\+\+ will not do"):
        build.find_compiler()


def test_what_an_old_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels are built without, take the best that is there, and a start says what lacks."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("there is one variant alone")
    old = tmp_path / "old-g++"
    unknown = "-mavx512*|-mamx*"
    old.write_text(
        "#!/bin/sh\n"
        f'for one in "$@"; do case "$one" in {unknown}) echo "unknown $one" >&2; exit 1;; esac; '
        f'done\nexec {build.find_compiler()} "$@" -O1\n'
    )
    old.chmod(0o755)
    path = tmp_path / "libheadrace.so"
    monkeypatch.setattr(build, "build", partial(build.build, output=path))
    assert build.main(["--compiler", str(old)]) == 0
    line = "without avx512, avx512_bf16, amx, which this compiler does not know"
    assert line in capsys.readouterr().err
    found, best = load_library(path), load_library()
    assert found.isa == "avx2"
    assert found.lacks == (None if best.isa == "avx2" else best.isa)
    assert best.lacks is None
    handle = ctypes.CDLL(str(path))
    handle.headrace_use.restype = ctypes.c_bool
    assert not handle.headrace_use(b"amx")
    step = Step(make_layout([(0, 5), (70, 1)], 16, 0, 0), (4, 2), (64, 64), torch.float32)
    expected, _ = step.run(TorchAttentionBackend(), torch.float64)
    actual, _ = step.run(NativeAttentionBackend(found), torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[torch.float32])

    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(packing, "native_library", lambda: found)
    lines: list[str] = []
    load_model(str(tmp_path / "model"), LoadConfig(threads=1), lines.append)
    told = [line for line in lines if line.startswith("the native kernels use avx2, and this")]
    assert len(told) == (found.lacks is not None)
    assert all("with g++ 11 or newer, run `" in line for line in told)
