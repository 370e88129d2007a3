"""Adapters through the whole server: which request gets which, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapter_files import PeftAdapter
from tests.service.real_server import ROOT, clean_environment, real_server
from tests.tiny_models import greedy_reference

DEMO = ROOT / "models" / "demo"
PROMPT = list(range(5, 40))
NEW = 12
ADAPTERS = ("team-a", "team-b")


@dataclass(frozen=True)
class Served:
    """A server with two adapters, and what each generates by name; the base's has no name."""

    client: headrace.Client
    whole: dict[str, list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PeftAdapter]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    options: dict[str, Any] = {"target_modules": "all-linear", "size": 1.0}
    return {
        name: PeftAdapter(model, root / name, seed=seed, **options)
        for seed, name in enumerate(ADAPTERS)
    }


@pytest.fixture(scope="module")
def served(folders: dict[str, PeftAdapter]) -> Iterator[Served]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    whole = {name: one.generate(PROMPT, NEW) for name, one in folders.items()}
    whole[""] = greedy_reference(model, PROMPT, NEW)
    flags = [f"--adapter={name}={one.directory}" for name, one in folders.items()]
    with real_server("--listen", "127.0.0.1:0", "--dtype", "float32", *flags) as server:
        server.wait_until_ready()
        with headrace.Client(server.addresses[0]) as client:
            yield Served(client, whole)


def generate(served: Served, **more: str) -> list[int]:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, **more}
    return list(served.client.generate(PROMPT, **options).token_ids)


@pytest.mark.parametrize("name", ["", *ADAPTERS])
@pytest.mark.parametrize("field", ["adapter", "model"])
def test_a_request_gets_the_tokens_of_its_adapter(served: Served, name: str, field: str) -> None:
    found = generate(served, **({field: name} if name else {}))
    assert found == served.whole[name]
    assert len({tuple(one) for one in served.whole.values()}) == 3


def test_what_is_not_loaded_is_not_found_and_names_no_other(served: Served) -> None:
    with pytest.raises(headrace.NotFoundError) as raised:
        generate(served, adapter="team-c")
    assert raised.value.reason == "ADAPTER_NOT_LOADED"
    assert not any(name in str(raised.value) for name in ADAPTERS)


def test_two_adapters_are_refused(served: Served) -> None:
    with pytest.raises(headrace.InvalidArgumentError, match="name one"):
        generate(served, adapter="team-a", model="team-b")


def test_a_server_tells_that_it_has_adapters(served: Served) -> None:
    assert "adapters" in served.client.model().capabilities.names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no config", "adapter_config.json cannot be read"),
        ("a template", "chat_template.jinja is not the base's"),
    ],
)
def test_a_start_ends_where_an_adapter_cannot_be_served(
    folders: dict[str, PeftAdapter], tmp_path: Path, change: str, reason: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(folders["team-a"].directory).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    if change == "no config":
        (broken / "adapter_config.json").unlink()
    else:
        (broken / "chat_template.jinja").write_text("{{ messages }}")
    command = [str(Path(sys.executable).parent / "headrace-server"), "serve"]
    command += ["--model", str(DEMO), "--listen", "127.0.0.1:0", "--adapter", f"team-a={broken}"]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert f"adapter 'team-a' ({broken}): {reason}" in done.stderr
