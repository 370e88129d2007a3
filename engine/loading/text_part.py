"""The text part of a model whose class also has towers, for images, video or sound.

    config ─▶ the class that generates ─▶ its modules ─┬─ the text model   ─▶ made and read
                                                       ├─ the output layer ─▶ made and read
                                                       └─ the towers       ─▶ left out

The text model is the module that has the config's own `get_text_config`. The class stays the one
that transformers has for the checkpoint, with its own forward and its own names of weights, so a
text prompt is computed as the whole model computes it. A tower that is left out has no weights in
the model, and transformers reads only the weights that the model has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from engine.contract.errors import ModelRefusedError

_FLAT: Mapping[str, tuple[str, ...]] = {
    "phi4_multimodal": (
        "model.embed_tokens_extend.image_embed",
        "model.embed_tokens_extend.audio_embed",
    ),
}
"""The towers of models whose config has no text config of its own, by model type."""
_OWN_CLASS = {
    "fast_vlm": "its towers cannot be made without the packages timm and Pillow",
    "gemma3n": "its towers cannot be made without the packages timm and Pillow",
    "gemma4_unified": "its masks depend on the images of a prompt, even where there are none",
    "perception_lm": "its towers cannot be made without the packages timm and Pillow",
    "qwen2_audio": "it computes the logits of all tokens",
    "video_llama_3": "it computes the logits of all tokens",
}
"""Models whose text runs as the text config's own class, and why not as the class with towers."""
_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""How the names of their weights differ from those of the text config's own class."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """What runs the text of a checkpoint.

    Attributes:
        model_class: the class, which makes no towers.
        config: the config that the class is made with.
        is_whole: whether the checkpoint has nothing else.
        names: replaces parts of the weights' names, before the rules of the class do: patterns and
            what they become.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    is_whole: bool
    names: Mapping[str, str] = field(default_factory=dict)


def find_text_part(config: PreTrainedConfig) -> TextPart:
    """Find the part of a model that text needs.

    This is the class that AutoModelForCausalLM has for the config, or else the class for all that
    it has. If the class has towers, they are not made.

    Raises:
        ModelRefusedError: no class of transformers generates text with this config, or the config
            has several text models.
    """
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ModelRefusedError(
            f"model type {config.model_type!r}: the config has several text models, and only one "
            f"can be served: {error}"
        ) from error
    if config.model_type in _OWN_CLASS:
        return TextPart(_class_of(text), text, is_whole=False, names=_NAMES)
    model_class = _class_of(config)
    if text is config and config.model_type not in _FLAT:
        return TextPart(model_class, config, is_whole=True)
    if model_class.config_class is config.sub_configs.get("text_config"):
        return TextPart(model_class, text, is_whole=False)
    return TextPart(_without_towers(model_class), config, is_whole=False)


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a config, whatever parts it has."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            found: type[PreTrainedModel] = mapping[type(config)]
            return found
    raise ModelRefusedError(
        f"model type {config.model_type!r} has no causal language model in transformers"
    )


def _without_towers(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class like another one, but whose models have no towers."""

    def make(self: Any, config: PreTrainedConfig, *given: Any, **named: Any) -> None:
        model_class.__init__(self, config, *given, **named)
        _leave_out(self)

    def set_attention(self: Any, chosen: str | dict[str, str], *given: Any, **named: Any) -> None:
        if isinstance(chosen, str):  # transformers warns of configs whose models it does not find
            text = self.config.get_text_config()
            parts = [one for one in self.config.sub_configs if getattr(self.config, one) is text]
            chosen = dict.fromkeys(("", *parts), chosen)
        model_class.set_attn_implementation(self, chosen, *given, **named)

    # transformers finds rules for the names of weights by the name of a class.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {"__init__": make, "set_attn_implementation": set_attention}
    return type(model_class.__name__, (model_class,), {**names, **methods})


class LeftOut(nn.Module):
    """In the place of a tower.

    Attributes:
        device: where inputs of a tower would have to be.
    """

    device = torch.device("meta")

    def forward(self, *_given: Any, **_named: Any) -> Any:
        """Refuse to compute.

        Raises:
            ModelRefusedError: always.
        """
        raise ModelRefusedError("a module that text does not need was called, and is left out")


def _leave_out(model: PreTrainedModel) -> None:
    """Replace the towers of a model."""
    towers = _towers(model)
    for path in towers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LeftOut())
    # What is known not to be read is not reported as unexpected.
    model._keys_to_ignore_on_load_unexpected = {rf"^{re.escape(path)}\." for path in towers}
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        has = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        model.all_tied_weights_keys = {one: by for one, by in tied.items() if one in has}


def _towers(model: PreTrainedModel) -> Sequence[str]:
    """Return the paths of a model's towers: what has weights, and is beside the text model.

    Raises:
        ModelRefusedError: no module has the text model's config.
    """
    if model.config.model_type in _FLAT:
        return _FLAT[model.config.model_type]
    kind, head = type(model.config.get_text_config()), model.get_output_embeddings()
    paths = (path for path, one in model.named_modules() if path and _has_config(one, kind))
    text = next(paths, None)
    if text is None:
        raise ModelRefusedError(
            f"{type(model).__name__} has no module for the text part of its config "
            f"({kind.__name__}), so it cannot be served without its other parts"
        )
    return [
        path
        for path, one in model.named_modules()
        if path.rpartition(".")[0] in _ancestors(text)
        and path not in (text, *_ancestors(text))
        and one is not head
        and any(True for _ in one.parameters())
    ]


def _ancestors(path: str) -> list[str]:
    """Return the paths that lead to a path, from the root, which is ""."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(len(words))]


def _has_config(module: nn.Module, kind: type[PreTrainedConfig]) -> bool:
    return isinstance(module, PreTrainedModel) and type(module.config) is kind


def left_out(part: TextPart, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return what is not read of a checkpoint, in bytes, by the first word of the weights' names.

    Args:
        part: the text part.
        nbytes: the size of each tensor of the checkpoint, by its name.

    Raises:
        ModelRefusedError: the checkpoint has no weight of the text part, or its class cannot be
            made.
    """
    if part.is_whole:
        return {}
    found: Counter[str] = Counter()
    for name in _not_in_model(part, nbytes):
        found[name.removeprefix("model.").partition(".")[0]] += nbytes[name]
    if nbytes and sum(found.values()) == sum(nbytes.values()):
        raise ModelRefusedError(
            "none of the checkpoint's weights is of the text model: they are of "
            f"{', '.join(sorted(found)[:3])}; get the whole checkpoint"
        )
    return dict(found)


def _not_in_model(part: TextPart, names: Iterable[str]) -> list[str]:
    """Return the names of a checkpoint's weights that its text model does not have.

    They are renamed as `from_pretrained` does it.

    Raises:
        ModelRefusedError: the class cannot be made.
    """
    try:
        with torch.device("meta"):
            model = part.model_class(part.config)
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise ModelRefusedError(
            f"{part.model_class.__name__} cannot be made with this config: {error}"
        ) from error
    rules, state = get_model_conversion_mapping(model, dict(part.names)), model.state_dict()
    renamings = [one for one in rules if isinstance(one, WeightRenaming)]
    converters = [one for one in rules if isinstance(one, WeightConverter)]
    prefix = model.base_model_prefix

    def is_known(name: str) -> bool:
        target, _ = rename_source_key(name, renamings, converters, prefix, state)
        return target in state or rename_source_key(name, [], [], prefix, state)[0] in state

    return [name for name in names if not is_known(name)]
