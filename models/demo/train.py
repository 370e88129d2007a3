"""Trains the demo model of Headrace and writes it next to this script.

Texts from ``documents`` become tokens, each marked as learned or not, then rows of whole texts,
which train a small Llama-shaped model. The output is ``model.safetensors``, ``config.json``,
``generation_config.json``, the tokenizer files and the chat template, all loadable by plain
``AutoModelForCausalLM.from_pretrained``. Every random choice depends only on ``--seed``.

The first steps teach only copying, on texts that repeat themselves. Everything else depends on it,
and a small model that trains on stories learns it late. Ctrl-C stops the training and saves the
current model; ``--resume`` continues from the last checkpoint, which is written every
``--save-every`` steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import torch
from documents import BOS, EOS, MARKS, PAD, SPECIALS, TALES, TEMPLATE, Mixture, Text
from tokenizer import train_tokenizer
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CHUNK = 1000  # texts per generator; each chunk has its own seed
IGNORED = -100
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Document:
    """A text as tokens, each with the token to be learned at that position, or `IGNORED`."""

    ids: list[int]
    labels: list[int]
    repeats: bool


def write_chunk(seed: int, tales: float, repeating: bool = False) -> list[Text]:
    """Writes ``CHUNK`` training texts."""
    mixture = Mixture(seed, tales)
    return [mixture.repeating() if repeating else mixture.text() for _ in range(CHUNK)]


def labels_of(ids: list[int], replies_only: bool) -> list[int]:
    """Return what is learned from a text: everything, or the replies up to their end mark. The mark
    that opens reasoning belongs to the template and is never learned.
    """
    assistant, end = SPECIALS.index("<|assistant|>"), SPECIALS.index(EOS)
    think = len(SPECIALS) + MARKS.index("<think>")
    labels, replying = [], not replies_only
    for i, id in enumerate(ids):
        opened = id == think or (i > 0 and ids[i - 1] == think)
        labels.append(id if replying and not opened else IGNORED)
        if replies_only:
            replying = id == assistant or (replying and id != end)
    return labels


def encode(tokenizer: Tokenizer, texts: list[Text], rng: random.Random) -> list[Document]:
    """Encodes the texts. One in fifty is split into smaller tokens than necessary (BPE dropout), so
    that the model also learns the tokens that unknown words consist of.
    """
    rough = {i for i in range(len(texts)) if rng.random() < 1 / 50}
    plain = [text.text for text in texts]
    ids = [e.ids for e in tokenizer.encode_batch_fast(plain, add_special_tokens=False)]
    loose = Tokenizer.from_str(tokenizer.to_str())
    loose.model.dropout = 0.1
    for i in rough:
        ids[i] = loose.encode(plain[i], add_special_tokens=False).ids
    return [
        Document(found, labels_of(found, text.replies_only), text.repeats)
        for found, text in zip(ids, texts, strict=True)
    ]


def repeated_pieces(size: int, rng: random.Random) -> Document:
    """Return random tokens followed by the same tokens again. Only the repetition is learned."""
    low = len(SPECIALS) + len(MARKS)
    row = [rng.randrange(low, size) for _ in range(rng.randint(6, 60))]
    times = rng.choice([1, 2])
    return Document(row * (times + 1), [IGNORED] * len(row) + row * times, repeats=True)


PART_TOKENS = 2048
LENGTHS = (64, 96, 128, 192, 256, 512)


@dataclass(frozen=True)
class Part:
    """Texts of similar length, one per row: a fraction of what a step learns.

    Attributes:
        ids: ``[rows, length]``; positions after the end of a text are 0 and are not learned.
        places: the indices of the learned tokens' predecessors in the flattened ``ids``.
        targets: the learned tokens.
    """

    ids: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor


def part_of(docs: list[Document], length: int) -> Part:
    """Lays out texts in rows; texts longer than ``length`` are cut at the end."""
    ids = torch.zeros(len(docs), length, dtype=torch.long)
    labels = torch.full((len(docs), length), IGNORED)
    for row, doc in enumerate(docs):
        size = min(length, len(doc.ids))
        ids[row, :size] = torch.tensor(doc.ids[:size])
        labels[row, : size - 1] = torch.tensor(doc.labels[1:size])
    places = (labels.flatten() != IGNORED).nonzero().flatten()
    part = Part(ids, places, labels.flatten()[places])
    # One compilation for each of `LENGTHS`, whatever the number of learned tokens.
    torch._dynamo.mark_static(part.ids)
    torch._dynamo.mark_dynamic(part.places, 0)
    torch._dynamo.mark_dynamic(part.targets, 0)
    return part


def parts(docs: list[Document], seed: int) -> Iterator[Part]:
    """Divides the texts into parts of ``PART_TOKENS`` tokens, endlessly, each time in another
    order.

    A text has a row to itself, as a prompt does when the model is used, and is grouped with texts
    of similar length. Little is therefore spent on padding, and nothing on attention between texts.
    """
    rng = random.Random(seed)
    waiting: dict[int, list[Document]] = {length: [] for length in LENGTHS}
    while True:
        for i in rng.sample(range(len(docs)), len(docs)):
            size = len(docs[i].ids)
            length = next((length for length in LENGTHS if size <= length), LENGTHS[-1])
            waiting[length].append(docs[i])
            if len(waiting[length]) == PART_TOKENS // length:
                yield part_of(waiting[length], length)
                waiting[length] = []


def build_model(vocab_size: int, args: argparse.Namespace) -> LlamaForCausalLM:
    """Builds the untrained model."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=args.hidden // 8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        attn_implementation=args.attention,
    )
    return LlamaForCausalLM(config)


def schedule(step: int, steps: int, cooldown: int) -> float:
    """The share of the peak learning rate: warms up over 40 steps, stays constant, and falls
    linearly to a fiftieth over the last ``cooldown`` steps.
    """
    return min((step + 1) / 40, 1.0, 0.02 + 0.98 * (steps - step) / cooldown)


class Training:
    """The model during training: the contents of a checkpoint, and a step.

    Muon trains the matrices of the layers; AdamW trains the embeddings and the norms. The schedule
    counts steps, not time, so the process may be paused at will. The signal USR1 means that time is
    running out: the last ``args.cooldown`` steps begin immediately.
    """

    def __init__(self, model: LlamaForCausalLM, args: argparse.Namespace) -> None:
        """args: the command line."""
        self.model, self.args = model, args
        self.step, self.steps, self.seen, self.smooth = 0, args.steps, 0, 0.0
        inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(inner, lr=args.lr, weight_decay=0.01), args.lr),
            (
                torch.optim.AdamW(
                    outer, lr=args.lr_adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True
                ),
                args.lr_adam,
            ),
        ]
        bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere it would be emulated

        def loss_of(ids: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden.flatten(0, 1)[places])
            return functional.cross_entropy(logits.float(), targets, reduction="sum")

        self.loss_of = torch.compile(loss_of) if args.compile else loss_of

    def learn(self, parts: list[Part]) -> None:
        """Run one step."""
        share = schedule(self.step, self.steps, self.args.cooldown)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        learned, value = sum(len(part.targets) for part in parts), 0.0
        for part in parts:
            loss = self.loss_of(part.ids, part.places, part.targets) / learned
            torch.autograd.backward(loss)
            value += loss.item()
            self.seen += int((part.ids != 0).sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.smooth = value if not self.step else 0.97 * self.smooth + 0.03 * value
        self.step += 1

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "counts": (self.step, self.seen, self.smooth),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Reads a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seen, self.smooth = state["counts"]


def train(
    training: Training, tokenizer: Tokenizer, first: Iterator[Part], then: Iterator[Part]
) -> None:
    """Trains to the end. For the first ``args.copy_steps`` steps, the training data comes from
    ``first``.
    """
    args, start, began, seen = training.args, time.monotonic(), training.step, training.seen
    hurry = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hurry.set())
    training.model.train()
    try:
        while training.step < training.steps:
            if hurry.is_set():
                hurry.clear()
                training.steps = min(training.steps, training.step + args.cooldown)
            source = first if training.step < args.copy_steps else then
            training.learn([next(source) for _ in range(args.batch_tokens // PART_TOKENS)])
            step, elapsed = training.step, time.monotonic() - start
            if step % 20 == 0:
                left = elapsed * (training.steps - step) / (step - began)
                print(
                    f"step {step}/{training.steps}  loss {training.smooth:.3f}  "
                    f"{(training.seen - seen) / elapsed:,.0f} tokens/s  ETA {left / 60:.1f} min",
                    flush=True,
                )
            if args.save_every and step % args.save_every == 0:
                training.save(args.out / CHECKPOINT)
                save(copy.deepcopy(training.model), tokenizer, args.out)
    except KeyboardInterrupt:
        print("interrupted: saving what there is", flush=True)
    training.save(args.out / CHECKPOINT)
    minutes = (time.monotonic() - start) / 60
    print(
        f"{training.step} steps, {training.seen:,} tokens, {minutes:.1f} min, "
        f"loss {training.smooth:.3f}",
        flush=True,
    )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the model directory."""
    model.eval()
    model.to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=256,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
    )
    model.save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=SPECIALS[3:],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(out)
    # A class name that older releases of transformers know, too.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="directory to write")
    parser.add_argument("--init", type=Path, help="begin with the model in this directory")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=7, help="seed of the text and of the training")
    parser.add_argument("--docs", type=int, default=120_000, help="texts to write")
    parser.add_argument("--tales", type=float, default=TALES, help="share of stories and chats")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary")
    parser.add_argument(
        "--spaced", type=int, default=1000, help="its tokens that begin with a space"
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--ffn", type=int, default=704, help="feed-forward size")
    parser.add_argument("--layers", type=int, default=5, help="number of layers")
    parser.add_argument(
        "--attention", default="eager", help="transformers' attention (eager, sdpa)"
    )
    parser.add_argument("--steps", type=int, default=6000, help="training steps")
    parser.add_argument(
        "--copy-steps", type=int, default=300, help="the first of them, which teach to copy"
    )
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--lr-adam", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--cooldown", type=int, default=1500, help="steps of falling learning rate")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--save-every", type=int, default=200, help="save so often (0: never)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads and text writers")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile"
    )
    return parser.parse_args()


def main() -> None:
    """Writes the text, trains the tokenizer and the model, and saves both."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    start = time.monotonic()
    going_on = args.out if args.resume else args.init
    # What is read after a pause is new.
    done = torch.load(args.out / CHECKPOINT, weights_only=True)["counts"][0] if args.resume else 0
    seed = (args.seed + done) * 1_000_003
    seeds = [(seed + i, args.tales) for i in range(math.ceil(args.docs / CHUNK))]
    early = [
        (seed - 1 - i, args.tales, True)
        for i in range(math.ceil((args.copy_steps - done) * args.batch_tokens / 100 / CHUNK))
    ]
    with Pool(args.threads) as pool:
        texts = [text for chunk in pool.starmap(write_chunk, seeds) for text in chunk]
        copies = [text for chunk in pool.starmap(write_chunk, early) for text in chunk]
    print(
        f"{len(texts)} documents, {sum(len(text.text) for text in texts):,} characters", flush=True
    )
    if going_on:
        tokenizer = Tokenizer.from_file(str(going_on / "tokenizer.json"))
    else:
        shown = [text.text for text in texts[:20000]]
        tokenizer = train_tokenizer(shown, SPECIALS, MARKS, args.vocab, args.spaced)
    size = tokenizer.get_vocab_size()
    docs = encode(tokenizer, texts, rng)
    first = encode(tokenizer, copies, rng) + [repeated_pieces(size, rng) for _ in copies]
    docs += [repeated_pieces(size, rng) for _ in range(len(docs) // 16)]
    count, learned = (
        sum(len(d.ids) for d in docs),
        sum(x != IGNORED for d in docs for x in d.labels),
    )
    print(
        f"{count:,} tokens, {learned:,} learned, prepared in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if args.init:
        model = LlamaForCausalLM.from_pretrained(
            args.init, dtype=torch.float32, attn_implementation=args.attention
        )
    else:
        model = build_model(size, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    training = Training(model, args)
    if args.resume:
        training.load(args.out / CHECKPOINT)
    train(training, tokenizer, parts(first or docs, seed), parts(docs, seed))
    save(model, tokenizer, args.out)
    print(f"saved to {args.out}", flush=True)


if __name__ == "__main__":
    main()
