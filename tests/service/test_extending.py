"""The examples of docs/extending.md, run as they stand there: a policy of one's own on the server,
a control RPC from the command down to the engine's loop, a statistic from there to the command, and
a weight format.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from headrace.cli.app import app
from headrace.cli.control import app as control_commands
from headrace.v1 import control_service_pb2, control_service_pb2_grpc
from transformers import PreTrainedModel
from typer.testing import CliRunner

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import EngineVerbs
from engine.core.loop import EngineLoop
from engine.process.local_client import LocalEngineClient
from engine.process.verbs import VERBS, Verb
from service.config import ServiceConfig
from service.server import HeadraceServer
from service.servicers.control_servicer import ControlServicer
from tests.service import helpers
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer
from tests.service.real_server import clean_environment, real_server
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts

ROOT = Path(__file__).parents[2]
CLIENT = "clients/python/src/headrace"
PAGE = (ROOT / "docs" / "extending.md").read_text()
DEMO = str(ROOT / "models" / "demo")
SERVICE = "headrace.v1.ControlService"
METHOD = "ListEngineRequests"
DEADLINE_S = 60.0


def section(title: str) -> str:
    """A part of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str, language: str) -> list[tuple[str, str]]:
    """Its examples, each with the file that its text names first."""
    found = []
    parts = re.split(rf"```{language}\n(.*?)```", section(title), flags=re.DOTALL)
    for before, code in zip(parts[::2], parts[1::2], strict=False):
        own = re.split(r"\n\d\. ", before)[-1]
        files = re.findall(r"`([\w/.]+\.(?:py|proto))`", own)
        found.append((files[0] if files else "", textwrap.dedent(code)))
    return found


async def wait_until_waiting(client: headrace.AsyncClient, count: int) -> None:
    """Wait until so many requests are in the engine's queue."""
    async with asyncio.timeout(DEADLINE_S):
        async for seen in client.control.watch(0.1):
            if seen.engine.waiting == count:
                return


async def test_the_policy_of_the_page_orders_the_servers_requests(tmp_path: Path) -> None:
    [(file, code)] = blocks("A scheduling policy", "python")
    (tmp_path / file).write_text(code)
    names = re.search(r"--scheduler (\w+:\w+)", section("A scheduling policy"))
    assert names is not None
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    policy = ("--scheduler", names[1], "--max-requests-per-batch", "1")
    ended: list[str] = []
    with real_server("--listen", "127.0.0.1:0", *policy, PYTHONPATH=path) as server:
        server.wait_until_ready()
        async with headrace.AsyncClient(server.addresses[0]) as client:

            async def run(name: str) -> None:
                await client.generate("Once", request_id=name, max_tokens=2)
                ended.append(name)

            await client.control.pause()
            running = []
            for count, name in enumerate(("first", "second", "third"), 1):
                running.append(asyncio.create_task(run(name)))
                await wait_until_waiting(client, count)
            await client.control.resume()
            await asyncio.gather(*running)
    assert ended == ["third", "second", "first"]


@pytest.mark.parametrize("index", [0, 1])
async def test_the_formats_of_the_page_read_a_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    file, code = blocks("A format of replies", "python")[index]
    name = Path(file).stem
    (tmp_path / file).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = section("A format of replies")
    said = [re.search(r"model writes `(.+?)`", text), re.search(r"  # (=> .+)", text)][index]
    assert said is not None
    assert "--reply-parser do_calls:FORMAT" in text
    tokenizer = byte_tokenizer(chat_template="{{ messages[0].content }}")
    engine = FakeEngine(script=lambda *_: [*tokenizer.encode(said[1]), EOS])
    try:
        async with (
            helpers.serving(engine, tokenizer=tokenizer, reply_parser=f"{name}:FORMAT") as h,
            headrace.AsyncClient(h.server.addresses[0]) as client,
        ):
            result = await client.generate([{"role": "user", "content": "hi"}], max_tokens=99)
            card = await client.model()
    finally:
        sys.modules.pop(name, None)
    [call] = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("read_gauge", {"at": "Ulm"})
    assert card.capabilities.output.reply_parser == name
    assert ("tool_choice" in card.capabilities.names) == (index == 0)


def contract(folder: Path, file: str, inside: str, code: str, more: str = "") -> Any:
    """The files of the contract with this code at a place of this file, and more at its end."""
    shutil.copytree(ROOT / "protos", folder / "protos")
    shutil.copy(ROOT / "buf.yaml", folder)
    insert(folder / file, inside, code)
    with (folder / file).open("a") as end:
        end.write(f"\n{more}")
    built = subprocess.run(
        [Path(sys.executable).parent / "buf", "build", "-o", "-"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    return descriptor_pb2.FileDescriptorSet.FromString(built.stdout).file


def insert(file: Path, inside: str, code: str) -> None:
    """Put code, indented as is what follows, behind a line of a file."""
    before, line, after = file.read_text().partition(f"{inside}\n")
    assert line
    indent = after[: len(after) - len(after.lstrip(" "))]
    file.write_text(before + line + textwrap.indent(code, indent) + after)


@pytest.fixture
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The messages of the page's RPC, made of its lines of the contract."""
    (file, method), (_, described) = blocks("A control RPC", "proto")
    pool = descriptor_pool.DescriptorPool()
    for one in contract(tmp_path, file, "service ControlService {", method, described):
        pool.Add(one)
    made = pool.FindServiceByName(SERVICE).methods_by_name[METHOD]
    found = {"request": made.input_type, "answer": made.output_type}
    classes = {name: message_factory.GetMessageClass(kind) for name, kind in found.items()}
    for kind in classes.values():
        monkeypatch.setattr(control_service_pb2, kind.DESCRIPTOR.name, kind, raising=False)
    return classes


@pytest.fixture
def generated(messages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the generated code of the page's RPC would do: its stub, and its registration."""
    make_stub = control_service_pb2_grpc.ControlServiceStub.__init__
    register = control_service_pb2_grpc.add_ControlServiceServicer_to_server
    path = f"/{SERVICE}/{METHOD}"

    def init(self: Any, channel: Any) -> None:
        make_stub(self, channel)
        made = channel.unary_unary(
            path,
            request_serializer=messages["request"].SerializeToString,
            response_deserializer=messages["answer"].FromString,
            _registered_method=True,
        )
        setattr(self, METHOD, made)

    def add(servicer: Any, server: Any) -> None:
        register(servicer, server)
        handler = grpc.unary_unary_rpc_method_handler(
            getattr(servicer, METHOD),
            request_deserializer=messages["request"].FromString,
            response_serializer=messages["answer"].SerializeToString,
        )
        handlers = {METHOD: handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)

    monkeypatch.setattr(control_service_pb2_grpc.ControlServiceStub, "__init__", init)
    monkeypatch.setattr(control_service_pb2_grpc, "add_ControlServiceServicer_to_server", add)


OWNERS: dict[str, type[Any]] = {
    "engine/contract/engine_client.py": EngineVerbs,
    "engine/core/loop.py": EngineLoop,
    "engine/process/local_client.py": LocalEngineClient,
    "service/servicers/control_servicer.py": ControlServicer,
    "clients/python/src/headrace/control.py": headrace.control.Control,
    "clients/python/src/headrace/async_control.py": headrace.async_control.AsyncControl,
}
"""The classes of which the page says that their files get a method."""


@pytest.fixture
def extended(generated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree with all of the page's code for the RPC."""
    monkeypatch.setattr(
        control_commands, "registered_commands", list(control_commands.registered_commands)
    )
    written = {*OWNERS, "clients/python/src/headrace/cli/control.py"}
    done = set()
    for title in ("An engine verb", "A control RPC"):
        for file, code in blocks(title, "python"):
            if file not in written:
                continue
            done.add(file)
            name = file.removeprefix("clients/python/src/").removesuffix(".py").replace("/", ".")
            space = dict(vars(importlib.import_module(name)))
            before = set(space)
            exec(compile(f"from __future__ import annotations\n{code}", file, "exec"), space)
            [made] = set(space) - before - {"annotations"}
            if file in OWNERS:
                monkeypatch.setattr(OWNERS[file], made, space[made], raising=False)
            if file == "engine/contract/engine_client.py":
                monkeypatch.setitem(VERBS, space[made], Verb(space[made]))
    assert done == written


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """A server with the demo model in this process; its address."""
    engine = LocalEngineClient(DEMO, ContinuousBatchingConfig(), LoadConfig(threads=1))
    server = HeadraceServer(ServiceConfig(listen=("127.0.0.1:0",)), engine)
    await server.start()
    try:
        await server.ready()
        yield server.addresses[0]
    finally:
        await server.stop()


@pytest.mark.usefixtures("extended")
async def test_the_rpc_of_the_page_goes_from_the_command_to_the_engine() -> None:
    async with serving() as target, headrace.AsyncClient(target) as client:
        assert await client.control.engine_requests() == []
        await client.control.pause()
        running = asyncio.create_task(client.generate("Once", request_id="mine", max_tokens=1))
        await wait_until_waiting(client, 1)
        [name] = await client.control.engine_requests()
        assert name.startswith("anonymous/mine#")

        def blocking() -> None:
            with headrace.Client(target) as other:
                assert other.control.engine_requests() == [name]
            told = CliRunner().invoke(app, ["--target", target, "control", "engine-requests"])
            assert (told.exit_code, told.stdout) == (0, f"{name}\n"), told.output

        await asyncio.to_thread(blocking)
        await client.control.resume()
        await running
        assert await client.control.engine_requests() == []


@pytest.fixture
def with_format(tmp_path: Path) -> str:
    """A PYTHONPATH with the engine and the page's weight format in it: one file and one line."""
    shutil.copytree(ROOT / "engine", tmp_path / "engine")
    [(file, code)] = blocks("A weight format", "python")
    told = re.search(r"`(\S+)`, the line `(\w+)( = .*?)`", section("A weight format"))
    assert told is not None
    registry, name, value = told.groups()
    new = tmp_path / file
    assert not new.exists()
    new.write_text(code)
    changed = tmp_path / registry
    text, count = re.subn(rf"(?m)^{name} = .*", name + value, changed.read_text())
    assert count == 1
    changed.write_text(text)
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


def prompt_logprobs(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """What the model gives each token of a prompt but the first."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


def test_the_weight_format_of_the_page_is_served_and_planned(
    tmp_path: Path, with_format: str
) -> None:
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True  # so that the embedding reads packed rows
    model = make_model(config)
    path, prompt, count = str(tmp_path / "model"), make_prompts((20,))[0], 12
    model.save_pretrained(path)
    exact = prompt_logprobs(model, prompt)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.half().float())
    options = ("--model", path, "--quantization", "float16")
    with real_server(*options, "--listen", "127.0.0.1:0", PYTHONPATH=with_format) as server:
        server.wait_until_ready()
        with headrace.Client(server.addresses[0]) as client:
            assert client.model().quantization == "float16"
            result = client.generate(
                prompt, temperature=0, max_tokens=count, ignore_eos=True, prompt_logprobs=0
            )
    assert "packed for float16" in server.said
    assert list(result.token_ids) == greedy_reference(model, prompt, count)
    rounded = prompt_logprobs(model, prompt)
    given = torch.tensor([one.logprob for one in result.prompt.tokens[1:]])
    assert (given - rounded).abs().max() < 2e-5
    assert (exact - rounded).abs().max() > 2e-4
    plan = [Path(sys.executable).parent / "headrace-server", "plan", *options, "--json"]
    planned = subprocess.run(
        plan, env=clean_environment(PYTHONPATH=with_format), capture_output=True, check=True
    )
    told = json.loads(planned.stdout)
    assert told["model"]["packing"] == "float16"
    assert told["memory_bytes"]["weights"] == pytest.approx(2 * model.num_parameters(), rel=0.1)


def test_the_statistic_of_the_page_is_told_everywhere(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, source in (("engine", "engine"), ("service", "service"), ("headrace", CLIENT)):
        shutil.copytree(ROOT / source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    [(file, code)] = blocks("A statistic", "python")
    insert(tree / file, "    other_callers: CallerStats | None = None", code)
    read = re.search(r"`(engine/core/engine_core.py)`.*`(\w+=.*,)`", section("A statistic"))
    assert read is not None
    insert(tree / read[1], "        return EngineStats(", f"{read[2]}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with real_server(
        "--listen", "127.0.0.1:0", "--model", DEMO,
        PYTHONPATH=str(tree),
        OTEL_METRICS_EXPORTER="prometheus",
        OTEL_EXPORTER_PROMETHEUS_PORT=str(port),
    ) as server:  # fmt: skip
        server.wait_until_ready()
        target = server.addresses[0]
        with headrace.Client(target) as client:
            client.generate("Once", n=3, max_tokens=2)
        told = subprocess.run(
            [sys.executable, "-c", TOP, target],
            env=clean_environment(PYTHONPATH=str(tree)),
            capture_output=True,
            text=True,
            check=True,
        )
        page = until_told(f"http://127.0.0.1:{port}/metrics", "headrace_choices_total 3.0")
    found, shown = told.stdout.split("\n", 1)
    assert json.loads(found)["others"]["headrace.choices"] == 3.0
    assert re.search(r"^more +3 headrace.choices *$", shown, re.M)
    assert "# HELP headrace_choices_total Choices of accepted requests.\n" in page
    assert "# TYPE headrace_choices_total counter\n" in page


TOP = """
import sys
import headrace
from google.protobuf.json_format import MessageToJson
from headrace.cli.top import picture
from rich import print
with headrace.Client(sys.argv[1]) as client:
    found = client.control.statistics()
sys.stdout.write(MessageToJson(found.engine, indent=None) + "\\n")
print(picture(found, "here"))
"""
"""A program that prints the engine's statistics as JSON on a line, and the picture of `top`."""


def until_told(url: str, wanted: str) -> str:
    """The page at this address, once it has this line: the engine is asked once a second."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            text: str = answer.read().decode()
        if wanted in text:
            return text
        time.sleep(0.1)
    raise TimeoutError(wanted)
