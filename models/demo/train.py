"""Trains the demo model of Headrace and writes it next to this script.

What passes through here: documents from ``corpus.py`` become a byte-level BPE tokenizer, then
packed rows of tokens, then a small Llama-shaped model; out come ``model.safetensors``,
``config.json``, ``generation_config.json`` and the tokenizer files, all loadable by plain
``AutoModelForCausalLM.from_pretrained``. Every random choice hangs on ``--seed``. Ctrl-C stops the
training and saves what there is.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path

import torch
from corpus import Document, Message, Writer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = ("system", "user", "assistant")
SPECIALS = [PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES)]
CHUNK = 1000  # documents per generator; each chunk has its own seed

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role not in ['system', 'user', 'assistant'] -%}"
    "{%- set role = 'system' if role == 'developer' else 'user' -%}"
    "{%- endif -%}"
    "{{- '<|' + role + '|>' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] | trim -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] | trim -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- eos_token -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def render(messages: list[Message]) -> str:
    """Writes a chat exactly as the chat template does."""
    return BOS + "".join(f"<|{m['role']}|>{m['content'].strip()}{EOS}" for m in messages)


def to_text(doc: Document, rng: random.Random) -> str:
    """The training text of a document, with its marks. Plain text has a start mark half the time
    and sometimes begins in the middle, at a sentence or at any word, so that the model accepts
    prompts with and without the mark and goes on from anything."""
    if doc.messages:
        return render(doc.messages)
    text, pick = doc.text, rng.random()
    if pick < 0.45:
        starts = [m.end() for m in re.finditer(r"[.!?]\"?\s" if pick < 0.35 else r"\s", text)]
        early = [start for start in starts if start < 0.7 * len(text)]
        text = text[rng.choice(early) :] if early else text
    return (BOS if rng.random() < 0.5 else "") + text + EOS


def write_chunk(seed: int) -> list[str]:
    """Writes ``CHUNK`` training texts."""
    writer, rng = Writer(seed), random.Random(seed)
    return [to_text(writer.document(), rng) for _ in range(CHUNK)]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer that contains all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for special in SPECIALS:
        texts = [text.replace(special, " ") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> list[list[int]]:
    """Encodes the texts; one in fifty is cut into smaller pieces than necessary (BPE dropout), so
    that the model also learns the pieces of which words unknown to it will be made."""
    rough = {i for i in range(len(texts)) if rng.random() < 1 / 50}
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    loose = Tokenizer.from_str(tokenizer.to_str())
    loose.model.dropout = 0.1
    for i in rough:
        ids[i] = loose.encode(texts[i], add_special_tokens=False).ids
    return ids


def rows(docs: list[list[int]], seed: int) -> Callable[[int, int], torch.Tensor]:
    """Returns a function that packs documents into batches of the asked size, for ever."""
    rng = random.Random(seed)

    def tokens() -> Iterator[int]:
        while True:
            for i in rng.sample(range(len(docs)), len(docs)):
                yield from docs[i]

    stream = tokens()

    def batch(count: int, length: int) -> torch.Tensor:
        return torch.tensor([[next(stream) for _ in range(length)] for _ in range(count)])

    return batch


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
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def schedule(step: int, steps: int, cooldown: int) -> float:
    """The share of the peak learning rate: warms up over 40 steps, stays, and falls in a straight
    line to a fiftieth over the last ``cooldown`` steps."""
    return min((step + 1) / 40, 1.0, 0.02 + 0.98 * (steps - step) / cooldown)


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    batch: Callable[[int, int], torch.Tensor],
    args: argparse.Namespace,
) -> tuple[int, float]:
    """Trains the model in place; returns the tokens seen and the last smoothed loss.

    Muon turns the matrices of the layers; AdamW the embeddings and the norms. The schedule counts
    steps, never the clock, so the process may be paused at will. The signal USR1 says that time is
    running out: the last ``args.cooldown`` steps begin at once.
    """
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.Muon(inner, lr=args.lr, weight_decay=0.01), args.lr),
        (
            torch.optim.AdamW(
                outer, lr=args.lr_adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
            args.lr_adam,
        ),
    ]

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    smooth, seen, step, steps, start = 0.0, 0, 0, args.steps, time.monotonic()
    hurry = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hurry.set())
    model.train()
    try:
        while step < steps:
            if hurry.is_set():
                hurry.clear()
                steps = min(steps, step + args.cooldown)
            share = schedule(step, steps, args.cooldown)
            for optimizer, peak in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * share
            ids = batch(args.batch_tokens // args.length, args.length)
            loss = step_loss(ids)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            value = loss.item()
            smooth = value if not step else 0.97 * smooth + 0.03 * value
            seen += ids.numel()
            step += 1
            if step % 20 == 0:
                elapsed = time.monotonic() - start
                left = elapsed * (steps - step) / step
                print(
                    f"step {step}/{steps}  loss {smooth:.3f}  {seen / elapsed:,.0f} tokens/s"
                    f"  ETA {left / 60:.1f} min",
                    flush=True,
                )
            if args.save_every and step % args.save_every == 0:
                save(copy.deepcopy(model), tokenizer, args.out)
    except KeyboardInterrupt:
        print("interrupted: saving what there is", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{step} steps, {seen:,} tokens, {minutes:.1f} min, loss {smooth:.3f}", flush=True)
    return seen, smooth


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the model directory."""
    out.mkdir(parents=True, exist_ok=True)
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
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out, save_jinja_files=False)
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
    parser.add_argument("--init", type=Path, help="go on with the model in this directory")
    parser.add_argument("--seed", type=int, default=7, help="seed of the text and of the training")
    parser.add_argument("--docs", type=int, default=80_000, help="documents to write")
    parser.add_argument("--vocab", type=int, default=3072, help="size of the vocabulary")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--ffn", type=int, default=704, help="feed-forward size")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--steps", type=int, default=3000, help="training steps")
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--lr-adam", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--cooldown", type=int, default=400, help="steps of falling learning rate")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per packed row")
    parser.add_argument("--save-every", type=int, default=200, help="save so often (0: never)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads and text writers")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile"
    )
    return parser.parse_args()


def main() -> None:
    """Writes the text, trains the tokenizer and the model, and saves both."""
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    start = time.monotonic()
    seeds = [args.seed * 1_000_003 + i for i in range(math.ceil(args.docs / CHUNK))]
    with Pool(args.threads) as pool:
        texts = [text for chunk in pool.map(write_chunk, seeds) for text in chunk]
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters", flush=True)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts[:20000], args.vocab)
    docs = encode(tokenizer, texts, rng)
    count = sum(map(len, docs))
    print(f"{count:,} tokens, prepared in {time.monotonic() - start:.0f} s", flush=True)
    if args.init:
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        model = build_model(tokenizer.get_vocab_size(), args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, rows(docs, args.seed), args)
    save(model, tokenizer, args.out)
    print(f"saved to {args.out}", flush=True)


if __name__ == "__main__":
    main()
