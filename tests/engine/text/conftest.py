"""Tiny tokenizers of the usual kinds, trained on a few sentences, saved as model directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text import Tokenizer

SENTENCES = [
    "The wheel turns while the water runs, and the water runs while the wheel turns.",
    "A headrace brings water to the turbine; the tailrace takes it away again.",
    "def turn(wheel):\n    return wheel + 1\n",
    "Größe, naïve café, 水車 and 👩‍👩‍👧 stand beside the river.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Backend:
    """As GPT-2, Llama 3 and Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        SENTENCES * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return backend


def llama_like() -> Backend:
    """As Llama 2: BPE over ▁, bytes as a last resort, a blank dropped at the beginning."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({c for s in SENTENCES for c in s.replace(" ", "▁") if c.isascii() or c == "▁"})
    vocabulary += [c for c in letters if c != "\n"]
    words = ["▁t", "he", "▁the", "wh", "▁wh", "ee", "eel", "er", "at", "▁wheel"]
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("w", "h"),
        ("▁", "wh"),
        ("e", "e"),
        ("ee", "l"),
    ]
    merges += [("e", "r"), ("a", "t"), ("▁wh", "eel")]
    vocabulary += words
    backend = Backend(
        models.BPE(
            vocab={name: i for i, name in enumerate(vocabulary)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def unigram() -> Backend:
    """As T5: Metaspace and a Unigram model."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        SENTENCES * 3,
        trainers.UnigramTrainer(
            vocab_size=120,
            show_progress=False,
            special_tokens=["<unk>", "</s>"],
            unk_token="<unk>",
        ),
    )
    return backend


def word_piece() -> Backend:
    """As BERT."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        SENTENCES * 3,
        trainers.WordPieceTrainer(
            vocab_size=150, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


def byte_level_words() -> Backend:
    """Byte-level, but with a decoder chain that is not recognised, so that the window is used."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Fuse()])
    return backend


KINDS: dict[str, Any] = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "unigram": unigram,
    "word_piece": word_piece,
    "byte_level_words": byte_level_words,
}
SPECIAL: dict[str, dict[str, str]] = {
    "byte_level": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
    "llama_like": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "unigram": {"eos_token": "</s>", "unk_token": "<unk>"},
    "word_piece": {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    "byte_level_words": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind's directory, as transformers saves it."""
    from transformers import PreTrainedTokenizerFast

    found = {}
    for kind, make in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        whole = PreTrainedTokenizerFast(tokenizer_object=make(), **SPECIAL[kind])
        whole.chat_template = CHAT_TEMPLATE
        whole.save_pretrained(found[kind])
    return found


@pytest.fixture(scope="session")
def tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    """Every kind, loaded."""
    return {kind: Tokenizer.load(directory) for kind, directory in directories.items()}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind in turn."""
    return str(request.param)


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer], kind: str) -> Tokenizer:
    """Each kind in turn, loaded."""
    return tokenizers[kind]
