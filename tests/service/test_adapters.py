"""Adapters through the whole server: which request gets which, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
import psutil
import pytest
import torch
from headrace.cli.app import app
from headrace.v1.control_service_pb2 import REQUEST_STATE_HELD as HELD
from headrace.v1.model_service_pb2 import AdapterState
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.adapter_files import PeftAdapter
from tests.service.real_server import ROOT, WAIT_S, RealServer, clean_environment, real_server
from tests.tiny_models import greedy_reference

DEMO = ROOT / "models" / "demo"
PROMPT = list(range(5, 40))
NEW = 12
ADAPTERS = ("team-a", "team-b")


@dataclass(frozen=True)
class Served:
    """A server with two adapters, and what each generates by name; the base's has no name.
    `root`: where operators may load others from.
    """

    client: headrace.Client
    whole: dict[str, list[int]]
    folders: dict[str, PeftAdapter]
    root: Path
    process: RealServer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PeftAdapter]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    options: dict[str, Any] = {"target_modules": "all-linear", "size": 1.0}
    return {
        name: PeftAdapter(model, root / name, seed=seed, **options)
        for seed, name in enumerate((*ADAPTERS, "v1", "v2"))
    }


@pytest.fixture(scope="module")
def served(folders: dict[str, PeftAdapter]) -> Iterator[Served]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    whole = {name: one.generate(PROMPT, NEW) for name, one in folders.items()}
    whole[""] = greedy_reference(model, PROMPT, NEW)
    flags = [f"--adapter={name}={folders[name].directory}" for name in ADAPTERS]
    root = folders["v1"].directory.parent
    flags += [f"--adapter-root={root}", "--max-unread-tokens", "8", "--max-queue-size", "64"]
    with real_server("--listen", "127.0.0.1:0", "--dtype", "float32", *flags) as server:
        server.wait_until_ready()
        with headrace.Client(server.addresses[0]) as client:
            yield Served(client, whole, folders, root, server)


def generate(served: Served, **more: str) -> list[int]:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, **more}
    return list(served.client.generate(PROMPT, **options).token_ids)


@pytest.mark.parametrize("name", ["", *ADAPTERS])
@pytest.mark.parametrize("field", ["adapter", "model"])
def test_a_request_gets_the_tokens_of_its_adapter(served: Served, name: str, field: str) -> None:
    found = generate(served, **({field: name} if name else {}))
    assert found == served.whole[name]
    assert len({tuple(one) for one in served.whole.values()}) == 5


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


def states(served: Served) -> dict[str, tuple[str, int]]:
    """By name and digest: an adapter's state, and how many requests have it."""
    return {
        f"{one.name} {one.digest[:8]}": (
            AdapterState.Name(one.state).removeprefix("ADAPTER_STATE_").lower(),
            one.live_requests,
        )
        for one in served.client.adapters()
    }


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_operator_loads_replaces_and_unloads(served: Served) -> None:
    control = served.client.control
    first = control.load_adapter("c", "v1").adapter
    assert first.base_model.endswith("demo")
    assert generate(served, adapter="c") == served.whole["v1"]
    with pytest.raises(headrace.AlreadyExistsError, match="set replace"):
        control.load_adapter("c", "v2")
    second = control.load_adapter("c", "v2", replace=True).adapter
    # The same prompt, whose prefix is cached for the first content.
    assert generate(served, adapter="c") == served.whole["v2"]
    assert generate(served, model="c") == served.whole["v2"]
    assert first.digest != second.digest
    figures = control.statistics().engine.others
    assert figures["headrace.adapters"] == 3
    assert figures["headrace.adapters.memory"] >= 3 * second.size_bytes
    assert control.unload_adapter("c") == 0
    with pytest.raises(headrace.NotFoundError):
        generate(served, adapter="c")
    assert not any(name.startswith("c ") for name in states(served))


def test_statistics_tell_of_adapters(served: Served) -> None:
    """A name goes on with its counts when it comes back, and those of others are not changed."""

    def told(name: str) -> tuple[int, int]:
        rows = {one.name: one for one in control.statistics().engine.by_adapter}
        row = rows.get(name)
        return (0, 0) if row is None else (row.prompt_tokens, row.generated_tokens)

    control, before = served.client.control, served.client.control.statistics().engine
    had, others = told("seen"), told("team-a")
    assert had == (0, 0)
    for source in ("v1", "v2"):
        control.load_adapter("seen", source)
        assert generate(served, adapter="seen") == served.whole[source]
        control.unload_adapter("seen")
    base = generate(served)
    after = control.statistics().engine
    assert told("seen")[0] > 0
    assert told("seen")[1] == 2 * NEW
    assert told("team-a") == others
    assert after.generated_tokens - before.generated_tokens == 2 * NEW + len(base)
    assert after.others["headrace.adapters.limit"] == 256
    assert after.others["headrace.adapters.memory.limit"] == 1 << 30
    phases = {one.name: one.duration for one in control.statistics().startup_phases}
    assert phases["adapters"].ToNanoseconds() > 0


@pytest.mark.parametrize("change", ["replace", "unload", "unload with a timeout"])
def test_a_held_request_goes_on_with_what_it_began_with(served: Served, change: str) -> None:
    """It is held because nobody reads it, before a change and after."""
    control, new = served.client.control, 300  # more than are made before it is held
    digest = control.load_adapter("h", "v1").adapter.digest
    with served.client.session(initial_credit=4) as session:
        handle = session.submit(PROMPT, adapter="h", temperature=0, max_tokens=new, ignore_eos=True)
        until(lambda: [one.adapter for one in control.requests() if one.state == HELD] == ["h"])
        if change == "replace":
            control.load_adapter("h", "v2", replace=True)
        else:
            assert control.unload_adapter("h", None if change == "unload" else 0) == 1
        if change != "unload with a timeout":
            assert states(served)[f"h {digest[:8]}"] == ("unloading", 1)
        result = handle.result(WAIT_S)
        assert handle.accepted().adapter_digest == digest
    if change == "unload with a timeout":
        assert result.finish_reason is headrace.FinishReason.CANCELLED
    else:
        expected = greedy_reference(served.folders["v1"].model.base_model.model, PROMPT, new)
        assert list(result.token_ids) == expected
    until(lambda: f"h {digest[:8]}" not in states(served))
    if change == "replace":
        assert generate(served, adapter="h") == served.whole["v2"]
        control.unload_adapter("h")


def test_what_was_loaded_is_loaded_again_when_the_engine_dies(
    served: Served, tmp_path: Path
) -> None:
    """What has gone meanwhile, or has other content, is refused; what was unloaded stays so."""
    control = served.client.control
    for name in ("lost", "other"):
        shutil.copytree(served.root / "v1", served.root / name)
        control.load_adapter(name, name)
    control.load_adapter("kept", "v2", pinned=True)
    control.unload_adapter("team-b")
    before = {one.name: one for one in served.client.adapters()}
    shutil.rmtree(served.root / "lost")
    shutil.copytree(served.root / "v2", served.root / "other", dirs_exist_ok=True)
    [engine] = psutil.Process(served.process.process.pid).children()
    restarts = control.statistics().engine_restarts
    engine.kill()
    until(lambda: control.statistics().engine_restarts > restarts)
    after = {one.name: one for one in served.client.adapters()}
    assert after == {name: before[name] for name in ("team-a", "kept")}
    assert generate(served, adapter="team-a") == served.whole["team-a"]
    assert generate(served, adapter="kept") == served.whole["v2"]
    for name in ("lost", "other", "team-b"):
        with pytest.raises(headrace.NotFoundError):
            generate(served, adapter=name)
    control.load_adapter("other", "other")
    assert generate(served, adapter="other") == served.whole["v2"]


def test_the_command(served: Served) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["--target", served.process.addresses[0], *words])

    said = run("control", "adapters", "load", "cli", "v1", "--pinned").stdout
    assert said.startswith("cli loaded pinned digest=")
    assert said in run("control", "adapters", "list").stdout
    assert run("control", "adapters", "load", "cli", "v2").exit_code == 1
    assert (
        "cli loaded digest=" in run("control", "adapters", "load", "cli", "v2", "--replace").stdout
    )
    told = run("control", "adapters", "unload", "cli", "--timeout", "0").stdout
    assert told == "unloaded: 0 live requests have it\n"
    done = run("control", "adapters", "load", "cli", "../v1")
    assert done.exit_code == 1
    assert "must be the name of a directory below" in done.stderr


async def test_the_asyncio_client(served: Served) -> None:
    async with headrace.AsyncClient(served.process.addresses[0]) as client:
        loaded = await client.control.load_adapter("async", "v1", pinned=True)
        assert loaded.adapter in await client.adapters()
        result = await client.generate(PROMPT, adapter="async", temperature=0, max_tokens=NEW)
        assert list(result.token_ids) == served.whole["v1"]
        assert await client.control.unload_adapter("async", 1.5) == 0


def test_a_name_of_the_served_model_ends_a_start(folders: dict[str, PeftAdapter]) -> None:
    command = [str(Path(sys.executable).parent / "headrace-server"), "serve", "--model", str(DEMO)]
    command += ["--listen", "127.0.0.1:0", f"--adapter=demo={folders['v1'].directory}"]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "has 'demo', a name of the served model" in done.stderr
