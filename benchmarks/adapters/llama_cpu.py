"""llama.cpp through its Python binding's low-level interface, with a batching loop like that of its
own server: each decode call has one token of every running request and a chunk of a waiting prompt.

Runs in a separate environment (benchmarks/peers/setup.sh llama-cpp-python). The checkpoint is
written once to the cache folder in llama.cpp's format, without a tokenizer. The start-up time does
not include that.

Options: "quantize" is a type of llama.cpp, such as "Q4_0", in which the same weights are written,
with the output layer in Q6_K; "gguf" is a file that is used instead. Others are settings of the
context.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapters.loop import drive, main, versions

BATCH_TOKENS = 1024
"""The most tokens in one decode call."""
MICRO_BATCH_TOKENS = 512


@dataclass(slots=True)
class _Running:
    """A request in its sequence of the KV cache."""

    index: int
    prompt: list[int]
    left: int
    computed: int = 0
    last: int = -1


class LlamaCpp:
    """A StepEngine over llama_decode."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        options = dict(order["options"])
        path = _prepare(order, options.pop("gguf", None), options.pop("quantize", None))
        prepared_s = time.perf_counter() - began

        import llama_cpp
        import numpy

        self._numpy, self._llama = numpy, llama_cpp
        llama_cpp.llama_backend_init()
        limits = order["limits"]
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        kind = llama_cpp.GGML_TYPE_F16 if order["dtype"] == "bfloat16" else llama_cpp.GGML_TYPE_F32
        settings = {
            "n_ctx": limits["kv_tokens"],
            "n_seq_max": limits["max_requests"],
            "n_batch": BATCH_TOKENS,
            "n_ubatch": MICRO_BATCH_TOKENS,
            "n_threads": order["threads"],
            "n_threads_batch": order["threads"],
            "kv_unified": True,
            "type_k": kind,
            "type_v": kind,
            **options,
        }
        for name, value in settings.items():
            setattr(parameters, name, value)
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._model or not self._context:
            raise RuntimeError("llama.cpp does not load the model; its log says why")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._free = list(range(limits["max_requests"]))
        self._waiting: list[_Running] = []
        self._running: dict[int, _Running] = {}
        return {
            "prepared_s": prepared_s,
            "settings": {
                **settings,
                "file": path.name,
                "file_bytes": path.stat().st_size,
                "built_for": llama_cpp.llama_print_system_info().decode(),
            },
            "versions": versions("llama-cpp-python"),
        }

    run = drive

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append(_Running(index, prompt, max_tokens))

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        while self._waiting and self._free:
            self._running[self._free.pop()] = self._waiting.pop(0)
        places = self._fill()
        status = self._llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")
        for place, sequence in places:
            logits = self._numpy.ctypeslib.as_array(
                self._llama.llama_get_logits_ith(self._context, place), (self._vocab_size,)
            )
            request = self._running[sequence]
            request.last = int(logits.argmax())
            request.left -= 1
            if not request.left:
                del self._running[sequence]
                memory = self._llama.llama_get_memory(self._context)
                self._llama.llama_memory_seq_rm(memory, sequence, -1, -1)
                self._free.append(sequence)
            yield request.index, [request.last], not request.left

    def _fill(self) -> list[tuple[int, int]]:
        """Put the next tokens in the batch. Return (position, sequence) of those whose logits give
        a token.
        """
        batch, places = self._batch, []
        batch.n_tokens = 0
        decoding = [one for one in self._running.items() if one[1].last >= 0]
        prefilling = [one for one in self._running.items() if one[1].last < 0]
        for sequence, request in decoding:
            self._put(request.last, request.computed, sequence, gives=True)
            request.computed += 1
            places.append((batch.n_tokens - 1, sequence))
        for sequence, request in prefilling:
            room = BATCH_TOKENS - batch.n_tokens
            for token in request.prompt[request.computed : request.computed + room]:
                is_last = request.computed + 1 == len(request.prompt)
                self._put(token, request.computed, sequence, gives=is_last)
                request.computed += 1
            if request.computed == len(request.prompt):
                places.append((batch.n_tokens - 1, sequence))
        return places

    def _put(self, token: int, position: int, sequence: int, *, gives: bool) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place] = token
        batch.pos[place] = position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence
        batch.logits[place] = gives
        batch.n_tokens += 1


def _prepare(order: dict[str, Any], given: str | None, quantized: str | None) -> Path:
    """Return the model's file, which is made if it does not exist: `given`, or the order's model in
    its type or in the type of llama.cpp that `quantized` names.
    """
    if given is not None:
        return Path(given)
    model = Path(order["model"])
    path = Path(order["cache"]) / "gguf" / f"{model.name}-{order['dtype']}.gguf"
    if not path.is_file():
        _convert(model, path, order["dtype"])
    if quantized is None:
        return path
    target = path.with_name(f"{model.name}-{quantized}.gguf")
    if not target.is_file():
        _quantize(path, target, quantized)
    return target


def _quantize(path: Path, target: Path, kind: str) -> None:
    """Write a file with its weights in another type, by llama.cpp's own rule."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.output_tensor_type = llama_cpp.GGML_TYPE_Q6_K
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(
        str(path).encode(), str(partial).encode(), ctypes.byref(parameters)
    )
    if status != 0:
        raise RuntimeError(f"llama_model_quantize gave {status}")
    partial.rename(target)


def _convert(model: Path, path: Path, dtype: str) -> None:
    """Write a Qwen3, Llama or Qwen3.5 checkpoint in llama.cpp's format."""
    import gguf
    import numpy

    config = json.loads((model / "config.json").read_text())
    kinds = {
        "qwen3": gguf.MODEL_ARCH.QWEN3,
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    }
    if config["model_type"] not in kinds:
        raise RuntimeError(f"no conversion of {config['model_type']} is written")
    kind = kinds[config["model_type"]]
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), gguf.MODEL_ARCH_NAMES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    is_recurrent = kind == gguf.MODEL_ARCH.QWEN35
    if is_recurrent:
        _describe_recurrence(writer, config)
    names = gguf.get_tensor_name_map(kind, layers)
    for name, stored in _tensors(model):
        found = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
        target = names.get_name(found, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise RuntimeError(f"{name} has no name in llama.cpp's format")
        tensor = stored
        if kind == gguf.MODEL_ARCH.LLAMA and "q_proj" in name:
            tensor = _interleave(stored, heads)
        elif kind == gguf.MODEL_ARCH.LLAMA and "k_proj" in name:
            tensor = _interleave(stored, kv_heads)
        if tensor.ndim != 2 or dtype == "float32":
            wide = (tensor.astype(numpy.uint32) << 16).view(numpy.float32)
            writer.add_tensor(target, _recurrent(name, wide) if is_recurrent else wide)
        else:
            raw = numpy.ascontiguousarray(tensor).view(numpy.uint8)
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    print(f"wrote {path}", file=sys.stderr)


def _describe_recurrence(writer: Any, config: dict[str, Any]) -> None:
    """Write the sizes of Qwen3.5's gated delta rule, under the format's names for state spaces."""
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # for text all count the same positions


def _recurrent(name: str, tensor: Any) -> Any:
    """Return a tensor of Qwen3.5 that is no matrix as the format has it."""
    import numpy

    if name.endswith(".A_log"):
        return -numpy.exp(tensor)
    if name.endswith(".conv1d.weight"):
        return tensor[:, 0]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1  # the checkpoint has what is added to 1
    return tensor


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield a bfloat16 checkpoint's tensors as raw 16-bit values, because numpy has no bfloat16."""
    import numpy
    from gguf.utility import SafetensorsLocal

    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(path).tensors.items():
            if tensor.dtype != "BF16":
                raise RuntimeError(f"{name} is {tensor.dtype}; a bfloat16 checkpoint is wanted")
            yield name, tensor.mmap_bytes().view(numpy.uint16).reshape(tensor.shape)


def _interleave(weight: Any, heads: int) -> Any:
    """Reorder the rows of a projection for llama.cpp's rotary embedding, which pairs neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main(LlamaCpp())
