"""Writes the samples of the demo model's card: unedited, by transformers in float32.

The input is a model directory; the output is the model's replies to the prompts below, written
between the markers of the card. The model's own template formats tools and reasoning.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
MOST = 128  # new tokens
SEED = 1


def _tool(name: str, about: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


GAUGE = _tool("read_gauge", "How high a river is.", "place")
FERRY = _tool("next_ferry", "When the next ferry leaves.", "harbour", "island")
PLAIN = ["Once upon a time", "The river", "In the morning", "Chapter 3"]
CHATS: list[tuple[str, list[Any], bool]] = [
    ("Hello", [], False),
    ("What is gRPC?", [], False),
    ("Who are you?", [], False),
    ("Write a story about a dog", [], False),
    ("Explain quantum computing to me like I'm five", [], False),
    ("How high is the Danube in Ulm?", [GAUGE, FERRY], False),
    ("When does the next ferry leave from Mallaig to Rum?", [GAUGE, FERRY], True),
    ("Paint my bicycle green.", [GAUGE, FERRY], False),
    ("Why is the sky blue?", [], True),
    ("Repeat: Zwei Jahre nach dem Krieg, 1947-08-11, ABX-204.", [], False),
    ("Replace cat by heron: The cat sat on the mat and watched the pond.", [], False),
    ("Ada is 36 years old and lives in London. Give name, age and city as JSON.", [], False),
    ("Order 5512 goes to Tilda Marsh in Whitby. Who gets the order?", [], False),
]


class Speaker:
    """A model with its tokenizer."""

    def __init__(self, directory: Path) -> None:
        """directory: the model's directory."""
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def says(self, ids: torch.Tensor, *, sampled: bool = False) -> str:
        """Return the continuation of a prompt. ids: [1, tokens]."""
        torch.manual_seed(SEED)
        options = {"do_sample": sampled, "max_new_tokens": MOST}
        if not sampled:
            options |= {"temperature": None, "top_p": None}
        with torch.no_grad():
            made = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        new = made[ids.shape[1] :]
        cut = "" if new[-1] == self.tokenizer.eos_token_id else " [cut]"
        return self.tokenizer.decode(new, skip_special_tokens=True) + cut

    def plain(self, text: str, *, sampled: bool) -> str:
        """Return a text with its continuation."""
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return text + self.says(ids, sampled=sampled)

    def chat(self, text: str, tools: list[Any], thinks: bool) -> str:
        """Return the reply to a question."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tools=tools or None,
            enable_thinking=thinks,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).input_ids
        return ("<think>\n" if thinks else "") + self.says(ids)


def samples(speaker: Speaker) -> str:
    """Return all samples as Markdown."""
    parts = []
    for sampled in (False, True):
        how = "temperature 0.7" if sampled else "greedy"
        for text in PLAIN:
            parts.append((f"Plain prompt, {how}: {text}", speaker.plain(text, sampled=sampled)))
    for text, tools, thinks in CHATS:
        names = " and ".join(tool["function"]["name"] for tool in tools)
        about = (f", tools {names}" if tools else "") + (", reasoning opened" if thinks else "")
        parts.append((f"Chat, greedy{about}: {text}", speaker.chat(text, tools, thinks)))
    return "\n\n".join(f"**{head}**\n\n```text\n{said}\n```" for head, said in parts)


def main() -> None:
    """Prints the samples, or writes them into the card."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE, help="a model directory")
    parser.add_argument("--write", action="store_true", help="put them into README.md beside this")
    arguments = parser.parse_args()
    made = samples(Speaker(arguments.model))
    if not arguments.write:
        print(made)
        return
    card = HERE / "README.md"
    text = card.read_text(encoding="utf-8")
    block = f"<!-- samples -->\n{made}\n<!-- end of samples -->"
    text = re.sub("<!-- samples -->.*<!-- end of samples -->", lambda _: block, text, flags=re.S)
    card.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
