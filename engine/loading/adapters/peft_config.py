"""Reads an adapter_config.json: what it says of ranks and layers. All else is refused by name.

Every option that peft has is either used here, says nothing about results, or must have the value
that asks for nothing. An option that is not known must be empty, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from engine.contract.errors import AdapterRefusedError
from engine.loading.adapters.name_patterns import NamePattern, NamePatternError

_Value = TypeVar("_Value")
_MOST_NAMES = 4096
"""The maximum number of names, patterns and layers in an option."""
_MOST_SHOWN = 256
_ALL_LINEAR = "all-linear"
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""How A and B may have begun. Others change the base, too."""
_USED = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "peft_type", "task_type", "bias",
    "init_lora_weights",
})  # fmt: skip
_TOLD = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config",
})  # fmt: skip
"""Options that say nothing of results: fan_in_fan_out is for merging, and A and B are the same."""
_NOT_SERVED = {
    "use_dora": "is DoRA, which is not served",
    "alora_invocation_tokens": "is an activated LoRA, which is not served",
    "use_qalora": "is QALoRA, which is not served",
    "use_bdlora": "is block-diagonal LoRA, which is not served",
    "lora_bias": "gives B a bias, which is not served",
    "modules_to_save": "replaces whole modules, which is not served",
    "trainable_token_indices": "changes embeddings, which is not served",
    "target_parameters": "changes parameters such as experts', which is not served",
    "layer_replication": "repeats layers, which is not served",
    "megatron_config": "is for Megatron, which is not served",
    "loftq_config": "changes the base model, which is not served",
    "corda_config": "changes the base model, which is not served",
    "arrow_config": "chooses among adapters, which is not served",
}
"""What options of other kinds mean."""


@dataclass(frozen=True, slots=True)
class _Names:
    """A list of names, a pattern, or all linear layers."""

    names: frozenset[str] = frozenset()
    pattern: NamePattern | None = None
    is_all: bool = False

    def fit(self, path: str) -> bool:
        if self.pattern is not None:
            return self.pattern.fits(path)
        parts = path.split(".")
        return any(".".join(parts[first:]) in self.names for first in range(len(parts)))


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter's config says.

    Attributes:
        rank, alpha: of layers that have none of their own.
        is_root: whether the scale is alpha / √rank, rather than alpha / rank.
        ranks, alphas: patterns of paths, and the ranks and alphas of the layers that fit the first.
        targets, excluded: which modules are adapted.
        layers: the indices of the layers that are adapted; None: all.
        layer_patterns: what stands before a layer's index; empty: anything.
        base_model: the base model's name, as it was written; may be empty.
    """

    rank: int
    alpha: float
    is_root: bool
    ranks: tuple[tuple[NamePattern, int], ...]
    alphas: tuple[tuple[NamePattern, float], ...]
    targets: _Names
    excluded: _Names
    layers: frozenset[int] | None
    layer_patterns: tuple[NamePattern, ...]
    base_model: str

    def adapts(self, path: str, is_linear: bool) -> bool:
        """Return whether a module is adapted, as peft decides it.

        Args:
            path: its path in the model.
            is_linear: whether "all-linear" includes it.

        Raises:
            AdapterRefusedError: a pattern takes too much work to match.
        """
        with _naming("target_modules"):
            if self.excluded.fit(path):
                return False
            if self.targets.is_all:
                return is_linear
            found = self.targets.fit(path)
            # peft does not look at the layers with a pattern, or a whole path.
            is_whole = self.targets.pattern is not None or path in self.targets.names
            return found and (is_whole or self._is_layer(path))

    def _is_layer(self, path: str) -> bool:
        if self.layers is None:
            return True
        parts = path.split(".")
        for at, part in enumerate(parts[1:-1], start=1):
            if not (part.isascii() and part.isdecimal()):
                continue
            before = ".".join(parts[:at])
            if self.layer_patterns:
                if any(one.fits(before) for one in self.layer_patterns):
                    return int(part) in self.layers
            elif at >= 2:  # peft wants a name before the list's
                return int(part) in self.layers
        return False

    def rank_of(self, path: str) -> int:
        """Return a layer's rank."""
        return _first(self.ranks, path, self.rank, "rank_pattern")

    def scale_of(self, path: str) -> float:
        """Return what multiplies a layer's product."""
        rank, alpha = self.rank_of(path), _first(self.alphas, path, self.alpha, "alpha_pattern")
        return alpha / (math.sqrt(rank) if self.is_root else rank)


def _first(
    patterns: Sequence[tuple[NamePattern, _Value]], path: str, default: _Value, name: str
) -> _Value:
    with _naming(name):
        return next((value for pattern, value in patterns if pattern.fits(path)), default)


class _naming:
    """Says which option a pattern's error is about."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, NamePatternError):
            raise _refused(self._name, str(error)) from error


def _refused(name: str, why: str) -> AdapterRefusedError:
    told = f"adapter_config.json: {name} {why}"
    # JSON may have halves of characters, which cannot be sent.
    return AdapterRefusedError(told.encode("utf-8", "backslashreplace").decode())


def parse_config(data: bytes, max_rank: int) -> LoraConfig:
    """Read an adapter_config.json.

    Args:
        data: the file; its size was checked.
        max_rank: the highest rank that is allowed.

    Raises:
        AdapterRefusedError: it is damaged, or asks for something that is not served.
    """
    try:
        config = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterRefusedError(f"adapter_config.json is not JSON: {str(error)[:80]}") from error
    if not isinstance(config, dict):
        raise AdapterRefusedError("adapter_config.json is not an object")
    _refuse_others(config)

    def rank(name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= max_rank:
            raise _refused(
                name,
                f"is {str(value)[:40]}; it must be a whole number from 1 to {max_rank} "
                "(max_adapter_rank)",
            ).naming("max_adapter_rank")
        return value

    def alpha(name: str, value: object) -> float:
        if type(value) not in (int, float) or not abs(float(str(value))) < 1e9:
            raise _refused(name, f"is {str(value)[:40]}; it must be a number")
        return float(str(value))

    excluded = _names("exclude_modules", config.get("exclude_modules"))
    targets = _names("target_modules", config.get("target_modules"), may_be_all=True)
    if targets == _Names():
        raise _refused("target_modules", "is empty, so nothing would be adapted")
    return LoraConfig(
        rank=rank("r", config.get("r", 8)),
        alpha=alpha("lora_alpha", config.get("lora_alpha", 8)),
        is_root=config.get("use_rslora") is True,
        ranks=_patterns("rank_pattern", config, rank),
        alphas=_patterns("alpha_pattern", config, alpha),
        targets=targets,
        excluded=excluded,
        layers=_layers(config.get("layers_to_transform")),
        layer_patterns=_layer_patterns(config.get("layers_pattern")),
        base_model=_shown(config.get("base_model_name_or_path")),
    )


def _shown(name: object) -> str:
    """Return a name as far as it can be shown."""
    if not isinstance(name, str):
        return ""
    return "".join(one for one in name[:_MOST_SHOWN] if one.isprintable())


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _refuse_others(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", f"is {str(config.get('peft_type'))[:40]}; only LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _refused("task_type", f"is {str(config['task_type'])[:40]}; only CAUSAL_LM is served")
    if config.get("bias", "none") != "none":
        raise _refused("bias", f"is {str(config['bias'])[:40]}; biases are not served")
    init = config.get("init_lora_weights", True)
    if not any(init is one or (isinstance(init, str) and init == one) for one in _PLAIN_INITS):
        raise _refused(
            "init_lora_weights",
            f"is {str(init)[:40]}, which changes the base model: save it as a plain LoRA "
            "(path_initial_model_for_weight_conversion)",
        )
    if config.get("use_rslora", False) not in (True, False):
        raise _refused("use_rslora", "is not true or false")
    for name, value in config.items():
        if name in _USED or name in _TOLD or not value:
            continue
        told = _NOT_SERVED.get(name, "is an option that is not known here, and is set")
        raise _refused(name[:80], told)


def _names(name: str, value: object, *, may_be_all: bool = False) -> _Names:
    if value is None or value == [] or value == "":
        return _Names()
    if isinstance(value, str):
        if may_be_all and value.lower() == _ALL_LINEAR:
            return _Names(is_all=True)
        with _naming(name):
            return _Names(pattern=NamePattern(value))
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _refused(name, "must be a list of names, or a regular expression")
    _check_count(name, value)
    return _Names(names=frozenset(value))


def _check_count(name: str, value: Any) -> None:
    if len(value) > _MOST_NAMES:
        raise _refused(name, f"has {len(value)} entries; at most {_MOST_NAMES} are allowed")


def _patterns(
    name: str, config: Mapping[str, Any], read: Callable[[str, object], Any]
) -> tuple[tuple[NamePattern, Any], ...]:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise _refused(name, "must be an object of patterns")
    _check_count(name, given)
    with _naming(name):
        return tuple(
            (NamePattern(rf"(.*\.)?({pattern})"), read(f"{name}[{pattern[:40]!r}]", value))
            for pattern, value in given.items()
        )


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in layers):
        raise _refused("layers_to_transform", "must be a whole number, or a list of them")
    _check_count("layers_to_transform", layers)
    return frozenset(layers)


def _layer_patterns(value: object) -> tuple[NamePattern, ...]:
    if not value:
        return ()
    given = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in given):
        raise _refused("layers_pattern", "must be a name, or a list of names")
    _check_count("layers_pattern", given)
    with _naming("layers_pattern"):
        return tuple(NamePattern(rf"(.*?\.)?({one})") for one in given)
