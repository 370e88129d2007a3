"""The service's options, the command line, and the errors' table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import (
    ConfigError,
    HeadraceError,
    InsufficientMemoryError,
    ModelRefusedError,
)
from engine.contract.option_fields import check_bounds, option
from engine.scheduler import policies as registry
from service.command import cli, flags
from service.command.welcome import installed, welcome
from service.config import SCHEDULERS, ServiceConfig
from service.door.address import Address, parse_address
from tests.service.fake_engine import model_info

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("listen", ()),
        ("listen", ("50051",)),
        ("listen", ("host:",)),
        ("listen", ("::1:50051",)),
        ("listen", ("127.0.0.1:70000",)),
        ("listen", ("unix:",)),
        ("listen", ("unix:/" + "x" * 120,)),
        ("listen", ("0.0.0.0:50051",)),
        ("listen", ("[::]:50051",)),
        ("listen", ("example.org:50051",)),
        ("served_alias", ("a",) * 17),
        ("served_alias", ("",)),
        ("served_alias", ("a b",)),
        ("served_alias", ("a\n",)),
        ("served_alias", ("a" * 129,)),
        ("tls_cert", "cert.pem"),
        ("tls_client_ca", "ca.pem"),
        ("max_requests_per_identity", -1),
        ("keepalive_interval_s", 1.0),
        ("max_connections", 0),
        ("max_streams_per_connection", 0),
        ("max_sessions", 0),
        ("max_sessions_per_identity", -1),
        ("max_watches", 0),
        ("message_timeout_s", 0.0),
        ("max_connection_age_s", 0.5),
        ("max_connection_age_s", 1e9),
        ("max_connection_age_grace_s", 5.0),
        ("drain_timeout_s", -1.0),
        ("drain_timeout_s", float("nan")),
        ("max_queue_size", 0),
        ("max_choices", 0),
        ("max_choices", 129),
        ("scheduler", "random"),
        ("default_max_tokens", 0),
        ("default_time_limit_s", 0.0),
        ("max_receive_bytes", (64 << 10) - 1),
        ("max_receive_bytes", (1 << 30) + 1),
        ("max_send_bytes", (4 << 20) - 1),
        ("max_reserved_tokens", -1),
        ("max_undelivered_bytes", 1),
        ("max_undelivered_bytes", (1 << 40) + 1),
        ("max_reserved_tokens", 256),
        ("max_reserved_tokens", 2**53 + 1),
        ("max_reserved_tokens_per_identity", 256),
        ("max_lease_s", 1e9),
        ("result_retention_s", -0.1),
        ("max_kept_results", -1),
        ("unix_socket_mode", 0o1000),
        ("log_level", "loud"),
        ("log_format", "xml"),
    ],
)
def test_options_out_of_bounds(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceConfig(**{option: value})
    assert caught.value.option == option


def test_addresses() -> None:
    assert parse_address("localhost:1") == Address("localhost", 1)
    assert parse_address("[::1]:0").target == "[::1]:0"
    assert parse_address("unix:/run/s").target == "unix:/run/s"
    assert parse_address("unix:///run/s").path == "/run/s"
    assert parse_address("unix:/run/a%20b").path == "/run/a%20b"
    assert parse_address("unix:/run/a%20b").target == "unix:/run/a%2520b"
    assert parse_address("unix:/run/\udcff").target == "unix:/run/%FF"  # bytes that are no UTF-8
    assert parse_address("127.8.0.1:1").is_local
    assert not parse_address("10.0.0.1:1").is_local
    ServiceConfig(listen=("0.0.0.0:1", "[::]:2"), insecure=True)
    ServiceConfig(listen=("0.0.0.0:1",), tls_cert="c", tls_key="k")


ALL = frozenset({"chat", "structured_output", "tool_choice", "tools", "typed_replies"})


def welcome_of(
    config: ServiceConfig,
    *bound: Address,
    capabilities: frozenset[str] = ALL,
    health: Address | None = None,
    **info: Any,
) -> list[str]:
    """The lines, without indents."""
    said = welcome(config, model_info(**info), bound, health, 1.0, capabilities)
    return [line.strip() for line in said.splitlines()]


def commands(lines: list[str]) -> list[str]:
    """The commands, each of which stands below what it shows."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("Try it"))
    block = lines[begin + 1 : lines.index("", begin)]
    assert all(line.endswith(":") for line in block[::2])
    assert len(block) % 2 == 0
    return block[1::2]


def test_welcome_commands_fit_the_address() -> None:
    local = Address("127.0.0.1", 50051)
    plain = welcome_of(ServiceConfig(), local)
    tour, stream, tool, form, bench = commands(plain)
    assert stream.endswith('headrace generate "Once upon a time"')
    assert tool.startswith('echo "How high is the Danube in Ulm?" | ')
    assert tool.endswith("/gauges.py --yes --tool-choice required -t 0")
    assert " generate --chat " in form
    assert form.endswith('"additionalProperties": false}\' -t 0')
    assert bench.endswith("headrace bench --concurrency 8 --requests 64")
    assert tour.endswith("headrace tour")
    secure = ServiceConfig(listen=("0.0.0.0:1",), tls_cert="c.pem", tls_key="k.pem")
    for command in commands(welcome_of(secure, Address("0.0.0.0", 443))):
        assert command.endswith(" --target 127.0.0.1:443 --ca c.pem")
    guarded = ServiceConfig(tls_cert="c", tls_key="k", tls_client_ca="a", auth_file="callers.toml")
    lines = welcome_of(guarded, Address("10.0.0.1", 443))
    assert "who may is in callers.toml" in "\n".join(lines)
    for command in commands(lines):
        assert command.endswith(" --ca c --client-cert CERT --client-key KEY --token TOKEN")
    unix = welcome_of(ServiceConfig(), Address(path="/run/s"))
    assert all(command.endswith(" --target unix:/run/s") for command in commands(unix))
    assert "first start `" in "\n".join(unix)
    assert "headrace top --target unix:/run/s`" in "\n".join(unix)


def test_welcome_says_what_is_served() -> None:
    local = Address("127.0.0.1", 1)
    plain = "\n".join(welcome_of(ServiceConfig(), local))
    assert "float32 on cpu)" in plain
    assert "tokenizer" not in plain
    assert "Health alone" not in plain
    light = welcome_of(
        ServiceConfig(),
        local,
        health=Address("127.0.0.1", 2),
        dtype="bfloat16",
        quantization="int8",
    )
    assert "Health alone on 127.0.0.1:2." in light
    assert "bfloat16, int8 weights, on cpu)" in light[0]


def test_welcome_commands_are_those_that_the_model_can_do() -> None:
    local = Address("127.0.0.1", 50051)
    for missing, without in (
        ({"tool_choice"}, "--tool-choice"),
        ({"tool_choice", "typed_replies"}, "--tools"),
        (ALL - {"structured_output"}, "--chat"),
    ):
        found = commands(welcome_of(ServiceConfig(), local, capabilities=ALL - missing))
        assert not [command for command in found if without in command]
        assert [command.rpartition("headrace ")[2].split()[0] for command in found] == [
            "tour",
            "generate",
            *(["chat"] if without == "--tool-choice" else []),
            "generate",
            "bench",
        ]
    ids = welcome_of(ServiceConfig(), local, capabilities=frozenset())
    assert "No tokenizer: prompts and outputs are token ids." in ids
    stream, bench = commands(ids)
    assert stream.endswith('headrace generate --token-ids "1 2 3"')
    assert " bench " in bench


def test_programs_are_called_as_a_shell_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = Path(sys.executable).parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed("headrace") == str(programs / "headrace")
    monkeypatch.chdir(programs.parent)
    assert installed("headrace") == "bin/headrace"
    monkeypatch.setenv("PATH", str(programs))
    assert installed("headrace") == "headrace"


def test_help_and_version_need_no_torch() -> None:
    blocked = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'grpc', 'tokenizers'): sys.modules[name] = None\n"
        "sys.argv = ['headrace-server', *sys.argv[1:]]\n"
        "from service.command.cli import main\n"
        "main()\n"
    )
    for arguments in (["--help"], ["serve", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", blocked, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "headrace-server" in done.stdout


def test_an_option_without_its_command_says_where_it_belongs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from service.command.cli import main; main()", "--model=x"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "headrace-server serve --model" in done.stderr


def run_serve(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Any:
    """Run `serve` up to the point where it would load a model; returns what it would serve."""
    started: list[Any] = []
    launched: list[Any] = []

    class Client:
        def __init__(self, model: str, batching: Any, load: Any, **more: Any) -> None:
            started.extend((model, batching, load))
            self.more = more

        def launch(self) -> None:
            launched.append(self)

    for module, name in (
        ("engine.process.local_client", "LocalEngineClient"),
        ("engine.process.process_client", "ProcessEngineClient"),
    ):
        stand_in = type(sys)(module)
        setattr(stand_in, name, type(name, (Client,), {}))
        vars(stand_in)["DEFAULT_HANG_TIMEOUT_S"] = 10.0
        monkeypatch.setitem(sys.modules, module, stand_in)

    def run_to_the_end(config: Any, client: Any, _output: Any, **_: Any) -> None:
        assert launched == [client], "the engine starts before the service is imported"
        started.extend((config, client))

    monkeypatch.setattr("service.command.process.run_to_the_end", run_to_the_end)
    result = CliRunner().invoke(cli.app, ["serve", *arguments], env=environment)
    return result, started


def test_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    result, (model, batching, load, config, _) = run_serve(
        monkeypatch,
        "--listen",
        "127.0.0.1:1",
        "--max-queue-size",
        "7",
        "--dtype",
        "float32",
        HEADRACE_MODEL="/models/m",
        HEADRACE_BLOCK_SIZE="32",
        HEADRACE_MAX_QUEUE_SIZE="9",
        HEADRACE_DRAIN_TIMEOUT="4.5",
        HEADRACE_UNIX_SOCKET_MODE="0600",
        HEADRACE_SERVED_ALIAS="small org/model:7b",
    )
    assert result.exit_code == 0, result.output
    assert model == "/models/m"
    assert (batching.block_size, batching.max_queue_size) == (32, 7)
    assert load.dtype == "float32"
    assert config.listen == ("127.0.0.1:1",)
    assert config.served_alias == ("small", "org/model:7b")
    assert (config.drain_timeout_s, config.unix_socket_mode) == (4.5, 0o600)


def test_the_engine_s_options_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, batching, load, config, _) = run_serve(monkeypatch)
    assert load.quantization == "none"
    assert load.pack_weights is None
    assert load.decoder == "own"
    assert batching.scheduler_type == config.scheduler
    assert batching.allow_block_sharing
    assert (batching.use_async_batching, batching.use_cuda_graph) == (None, None)
    assert (batching.cpu_offload_space, batching.default_compile_level) == (0.0, 0)
    assert batching.target_step_time is None
    _, (_, batching, load, config, _) = run_serve(
        monkeypatch,
        "--quantization",
        "int8",
        "--no-pack-weights",
        "--decoder",
        "transformers",
        "--scheduler",
        "prefill_first",
        "--target-step-time",
        "0",
        "--no-prefix-cache",
        "--cpu-offload-space",
        "1.5",
        "--async-batching",
        "--max-choices",
        "3",
        HEADRACE_CUDA_GRAPHS="false",
        HEADRACE_COMPILE_LEVEL="2",
    )
    assert (batching.scheduler_type, config.scheduler) == ("prefill_first", "prefill_first")
    assert not batching.allow_block_sharing
    assert not config.prefix_cache
    assert (batching.use_async_batching, batching.use_cuda_graph) == (True, False)
    assert (batching.cpu_offload_space, batching.default_compile_level) == (1.5, 2)
    assert batching.target_step_time == 0.0
    assert config.max_choices == 3
    assert load.quantization == "int8"
    assert load.pack_weights is False
    assert load.decoder == "transformers"


def test_the_server_is_fair_by_default_and_knows_the_engine_s_policies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (_, batching, _, config, _) = run_serve(monkeypatch)
    assert (batching.scheduler_type, config.scheduler) == ("fair", "fair")
    assert ContinuousBatchingConfig().scheduler_type == "fifo"
    assert sorted(SCHEDULERS) == sorted(registry._SCHEDULERS)


def test_the_engine_has_a_process_of_its_own_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, started = run_serve(monkeypatch, "--hang-timeout", "3")
    client = started[-1]
    assert type(client).__name__ == "ProcessEngineClient"
    assert client.more == {"log_level": "info", "log_level_of": (), "hang_timeout_s": 3.0}
    _, started = run_serve(monkeypatch)
    assert started[-1].more["hang_timeout_s"] == 10.0
    _, started = run_serve(monkeypatch, "--in-process")
    assert type(started[-1]).__name__ == "LocalEngineClient"
    assert started[-1].more == {}


def test_the_front_end_does_not_import_the_engine() -> None:
    """It would wait for that before it starts the engine's process."""
    lines = (
        "import sys",
        "for name in ('engine.process.local_client', 'engine.core'): sys.modules[name] = None",
        "import service.command.process",
        "service.command.process.run_to_the_end = lambda *_, **__: print('served')",
        "from service.command.cli import app",
        "app(['serve'])",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(cli.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("served\n")


def test_without_options_the_server_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    _, started = run_serve(monkeypatch)
    assert started[3] == ServiceConfig()
    # These differ from the engine's own.
    batching = started[1]
    assert (batching.block_size, batching.target_step_time) == (None, None)
    assert batching.per_request_processors


def test_an_option_is_a_field_and_all_else_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class MoreConfig:
        most_s: float = option(2.0, "Most [seconds](x.md).", low=0.5, high=60.0, group="More")
        is_loud: bool = option(False, "Whether `it` is loud.", group="More")

        def __post_init__(self) -> None:
            check_bounds(self)

    monkeypatch.setattr(flags, "CONFIGS", (*flags.CONFIGS, MoreConfig))
    flags.flags.cache_clear()
    try:
        seen: list[MoreConfig] = []
        app = typer.Typer()

        @app.command()
        @flags.command_of
        def serve(given: flags.Given) -> None:
            try:
                seen.append(given.config(MoreConfig))
            except ConfigError as error:
                raise SystemExit(flags.describe(error)) from error

        assert not CliRunner().invoke(app, ["--most", "3"], env={"HEADRACE_IS_LOUD": "1"}).exit_code
        assert seen == [MoreConfig(most_s=3.0, is_loud=True)]
        wrong = CliRunner().invoke(app, ["--most", "61"])
        assert str(wrong.exception) == "--most: is 61; it must be 0.5 to 60"
        shown = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
        assert "Most seconds. 0.5 to 60." in shown
        rows = flags.table().splitlines()
        assert "| `--most` | `HEADRACE_MOST` | `2` | Most [seconds](x.md). 0.5 to 60. |" in rows
        assert "| `--is-loud` | `HEADRACE_IS_LOUD` | off | Whether `it` is loud. |" in rows
    finally:
        flags.flags.cache_clear()


def test_several_addresses_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _, started = run_serve(monkeypatch, HEADRACE_LISTEN="127.0.0.1:1 unix:/run/s")
    assert started[3].listen == ("127.0.0.1:1", "unix:/run/s")
    assert started[0] == str(ROOT / "models" / "demo")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:1"], "--listen"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--device", "tpu"], "--device"),
        (["--block-size", "0"], "--block-size"),
        (["--unix-socket-mode", "9"], "--unix-socket-mode"),
        (["--compile-level", "4"], "--compile-level"),
        (["--cpu-offload-space", "-1"], "--cpu-offload-space"),
        (["--scheduler", "lifo"], "--scheduler"),
        (["--target-step-time", "-1"], "--target-step-time"),
        (["--max-choices", "0"], "--max-choices"),
        (["--max-reserved-tokens", "1"], "--max-reserved-tokens"),
        (["--max-receive-bytes", "0"], "--max-receive-bytes"),
        (["--max-send-bytes", "65536"], "--max-send-bytes"),
        (["--tls-cert", "c.pem"], "--tls-cert"),
        (["--in-process", "--hang-timeout", "5"], "--hang-timeout"),
        (["--in-process", "--hang-timeout", "10"], "--hang-timeout"),
    ],
)
def test_wrong_options_name_the_flag(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    result, started = run_serve(monkeypatch, *arguments)
    assert result.exit_code == 2
    assert f"headrace-server: {said}: " in result.stderr
    assert not started


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_hang_timeout_out_of_bounds_names_the_flag(seconds: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", f"--hang-timeout={seconds}"])
    assert result.exit_code == 2
    assert f"headrace-server: --hang-timeout: is {seconds}; it must be" in result.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("listen", "is taken"), "--listen: is taken"),
        (ConfigError("use_cuda_graph", "needs CUDA"), "--cuda-graphs: needs CUDA"),
        (ConfigError("scheduler_type", "is none"), "--scheduler: is none"),
        (ConfigError("q_padding_interval_size", "is odd"), "q_padding_interval_size: is odd"),
        (
            ConfigError("tls_cert", "and tls_key belong together").naming("tls_key"),
            "--tls-cert: and --tls-key belong together",
        ),
        (
            InsufficientMemoryError(
                "lower num_blocks or block_size, or raise max_memory_percent"
            ).naming("num_blocks", "block_size", "max_memory_percent"),
            "lower --num-blocks or --block-size, or raise --max-memory-percent",
        ),
        (
            ModelRefusedError("/srv/models/log_level is not a directory"),
            "/srv/models/log_level is not a directory",
        ),
    ],
)
def test_errors_of_the_start_name_flags(error: HeadraceError, said: str) -> None:
    assert flags.describe(error) == said


def test_every_flag_is_known_by_its_option() -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    for parameter in command.params:
        if parameter.name != "help":
            flag = flags.describe(ConfigError(parameter.name, "is wrong"))
            assert flag.removesuffix(": is wrong") in parameter.opts


def test_every_flag_has_a_variable() -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    for one in command.params:
        if one.name == "help":
            continue
        assert one.envvar == "HEADRACE_" + one.opts[0].removeprefix("--").upper().replace("-", "_")
    assert "HEADRACE_LISTEN" not in os.environ
