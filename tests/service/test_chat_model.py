"""A real chat model: what the engine and a server say is what transformers' `generate` says.

    make test-slow ARGS='--chat-model DIRECTORY tests/service/test_chat_model.py'

with the directory that `scripts/real_model.py` prints, or of another model with a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import headrace
import jsonschema
import numpy as np
import pytest
import torch
from headrace import FinishReason, Message
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import engine
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.sampling_params import GrammarKind, GrammarParams
from engine.contract.types import TokenId
from engine.loading.checkpoint import resolve_path
from engine.structured import GrammarCompiler
from engine.structured.matcher import ids_of, num_words
from engine.text import Tokenizer
from tests.near_ties import check_greedy
from tests.service.real_server import RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MAX_TOKENS = 48
AT_ONCE = 16
REQUESTS = (
    "What is {}?",
    "Write one sentence about {}.",
    "Name three things that have to do with {}, as a list.",
    "Explain {} to a child of six.",
    "Is there more of {} in summer or in winter? Why?",
)
TOPICS = (
    "rain",
    "a river",
    "1984",
    "Newton's second law",
    "C++",
    "Zürich",
    "bread",
    "prime numbers",
)
QUESTIONS = [request.format(topic) for topic in TOPICS for request in REQUESTS]
SENTENCES = (
    "Anna Berg is 34 years old and lives in Graz.",
    "In Lyon I met Paul Martin, aged 51.",
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest) -> Path:
    directory = request.config.getoption("--chat-model")
    if directory is None:
        pytest.skip("needs --chat-model DIRECTORY, as scripts/real_model.py makes one")
    assert isinstance(directory, Path)
    return resolve_path(str(directory), print)


def transformers_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    file = next(directory.glob("*.gguf"), None)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, gguf_file=None if file is None else file.name
    )
    return model.eval()


class Reference:
    """transformers, unchanged, in float32."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers_model(directory, torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt that a conversation becomes."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def tokens(
        self, prompt: list[int], allowed: Callable[[int, torch.Tensor], list[int]] | None = None
    ) -> list[int]:
        """Greedy tokens for a prompt alone; of those that are allowed, if that is given."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            prefix_allowed_tokens_fn=allowed,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def text(self, tokens: list[int]) -> str:
        """What tokens say."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    assert len(QUESTIONS) == 40
    return [reference.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def wanted(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """What `model.generate` says to each question."""
    wanted = [reference.tokens(prompt) for prompt in prompts]
    lengths = [len(tokens) for tokens in wanted]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    assert min(lengths) < max(lengths) == MAX_TOKENS  # some end by themselves
    return wanted


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    arguments = ("--model", str(directory), "--dtype", "float32", "--listen", "127.0.0.1:0")
    with real_server(*arguments) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[headrace.Client]:
    with headrace.Client(server.addresses[0]) as client:
        yield client


def generated(directory: Path, prompts: list[list[int]], dtype: str) -> list[list[int]]:
    """What the engine says, 16 requests at a time."""
    outputs = engine.load(str(directory), dtype=dtype).generate_batch(
        prompts,
        GenerationConfig(do_sample=False, max_new_tokens=MAX_TOKENS),
        ContinuousBatchingConfig(
            num_blocks=160, max_batch_tokens=128, max_requests_per_batch=AT_ONCE
        ),
        progress_bar=False,
    )
    return [output.generated_tokens for output in outputs.values()]


def test_in_float32_the_tokens_are_those_of_generate(
    directory: Path, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    assert generated(directory, prompts, "float32") == wanted


def test_in_bfloat16_the_tokens_are_float32_s_up_to_near_ties(
    directory: Path, prompts: list[list[int]], reference: Reference
) -> None:
    found = generated(directory, prompts, "bfloat16")
    rival = transformers_model(directory, torch.bfloat16)
    check_greedy(reference.model, zip(prompts, found, strict=True), rival)


def test_a_conversation(client: headrace.Client, reference: Reference) -> None:
    messages: list[dict[str, str]] = []
    for question in ("What is the capital of France?", "And of Italy?", "Which is older?"):
        messages.append({"role": "user", "content": question})
        wanted = reference.tokens(reference.prompt(messages))
        conversation = [Message(one["role"], one["content"]) for one in messages]
        found = client.generate(conversation, max_tokens=MAX_TOKENS)
        assert list(found.token_ids) == wanted
        assert found.text == reference.text(wanted)
        messages.append({"role": "assistant", "content": found.text})


def test_sixteen_at_once_on_one_session(client: headrace.Client, wanted: list[list[int]]) -> None:
    questions = QUESTIONS[:: len(QUESTIONS) // AT_ONCE][:AT_ONCE]
    with client.session() as session:
        handles = [
            session.submit([Message.user(question)], max_tokens=MAX_TOKENS)
            for question in questions
        ]
        found = [list(handle.result().token_ids) for handle in handles]
    assert found == [wanted[QUESTIONS.index(question)] for question in questions]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_person_by_a_schema(
    client: headrace.Client, directory: Path, reference: Reference, sentence: str
) -> None:
    asked = f"{sentence} Give this person's name, age and city as JSON."
    prompt = reference.prompt([{"role": "user", "content": asked}])
    vocabulary = reference.model.config.vocab_size
    end = reference.model.generation_config.eos_token_id
    compiler = GrammarCompiler(Tokenizer.load(directory, vocabulary), vocabulary)
    form = GrammarParams(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(PERSON))
    matcher = compiler.compile(form, frozenset({TokenId(end)})).make()
    mask = np.zeros(num_words(vocabulary), np.int32)

    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        if len(ids) > len(prompt):
            assert matcher.accept(TokenId(int(ids[-1])))
        if matcher.is_complete:
            return [end]
        matcher.fill_mask(mask)
        return ids_of(mask)

    wanted = [token for token in reference.tokens(prompt, allowed) if token != end]
    found = client.generate([Message.user(asked)], json_schema=PERSON, max_tokens=MAX_TOKENS)
    assert found.finish_reason is FinishReason.STOP
    assert [token for token in found.token_ids if token != end] == wanted
    person = json.loads(found.text)
    jsonschema.validate(person, PERSON)
    assert all(str(value) in sentence for value in person.values())
