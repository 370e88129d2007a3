"""The Java library: its own tests and form, its examples, and its artefact: the README's quick
start in a fresh directory, from a Maven repository of files, against a real server around a fake
engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import REPOSITORY, Addresses, run_program, running_server
from tests.service.real_server import demo_server

JAVA = REPOSITORY / "clients" / "java"
MAVEN = ("mvn", "-q", "-B", "-ntp")
QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""A program that ends within a second is not worth the second compiler."""
QUESTION = "How high is the Danube in Ulm?"
PROMPTS = [f"Prompt {number}: é 😀 \u2028 <&>" for number in range(64)]

# Builds may start from empty caches.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("mvn") is None or shutil.which("javac") is None,
        reason="Maven is not installed (or a JDK)",
    ),
]


def run(command: Sequence[str], folder: Path) -> str:
    """What a command printed, which must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def example(name: str) -> list[str]:
    classes = f"{JAVA}/target/classes:{JAVA}/target/lib/*"
    return ["java", *QUICK, "-cp", classes, str(JAVA / "examples" / f"{name}.java")]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    run([*MAVEN, "test-compile", "dependency:copy-dependencies"], JAVA)


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    with running_server("service_server") as running:
        yield running


@pytest.fixture(scope="module")
def tool_addresses() -> Iterator[Addresses]:
    with running_server("tool_server") as running:
        yield running


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, addresses: Addresses) -> str:
    found: str = getattr(addresses, request.param)
    return found


def test_its_own_tests() -> None:
    run([*MAVEN, "surefire:test"], JAVA)
    reports = [one.read_text() for one in (JAVA / "target/surefire-reports").glob("*.txt")]
    assert len(reports) >= 3
    assert all("Failures: 0, Errors: 0, Skipped: 0" in one for one in reports)


def test_its_form() -> None:
    run([*MAVEN, "spotless:check"], JAVA)


def test_its_version() -> None:
    pom = re.search(r"<version>(.*?)</version>", (JAVA / "pom.xml").read_text())
    source = (JAVA / "src/main/java/dev/headrace/client/HeadraceClient.java").read_text()
    assert pom is not None
    assert f'VERSION = "{pom[1]}"' in source
    assert f"<version>{pom[1]}</version>" in (JAVA / "README.md").read_text()


def test_a_session(address: str) -> None:
    done = run_program(example("Sessions"), address, "--max-tokens", "24", *PROMPTS)

    assert (done.code, done.err) == (0, "")
    for number, prompt in enumerate(PROMPTS, start=1):
        shifted = (prompt.encode()[1:] + prompt.encode()[:1]) * 2
        told = [x for x in done.out.split("\n") if x.startswith(f"[{number}] ")]
        text = "".join(re.sub(r'^\[\d+\] "|"$', "", one) for one in told[:-1])
        text = text.replace("\\u2028", "\u2028")
        assert text.rstrip("\ufffd") == shifted[:24].decode(errors="ignore")
        assert told[-1] == f"[{number}] length, 24 tokens"


def test_a_refused_request_leaves_the_others_alone(address: str) -> None:
    done = run_program(example("Sessions"), address, "--max-tokens", "2", "good", "")

    assert done.code == 1
    assert "[1] length, 2 tokens\n" in done.out
    assert done.err.startswith("[2] INVALID_ARGUMENT: ")
    assert "\n    add.spec.text.text: " in done.err


def test_an_address_where_nothing_listens() -> None:
    done = run_program(example("Sessions"), "unix:/nowhere/headrace.sock", "prompt")

    assert done.code == 1
    assert done.err.startswith("[1] UNAVAILABLE: cannot reach a Headrace server")


@pytest.mark.parametrize("where", ["tcp", "unix"])
@pytest.mark.parametrize("choice", [(), ("--tool-choice", "required")])
def test_a_question_is_answered_with_a_tool(
    tool_addresses: Addresses, where: str, choice: tuple[str, ...]
) -> None:
    done = run_program(example("Tools"), getattr(tool_addresses, where), *choice, QUESTION)

    assert done.out == "I look.\nI heard 3 m; 5 m; \n"
    assert done.err == ('read_gauge {"place": "Ulm"}: 3 m\nread_gauge {"place": "Köln"}: 5 m\n')
    assert done.code == 0


@pytest.mark.answers
def test_the_demo_model_answers_with_the_tool() -> None:
    done = run_program(example("Tools"), demo_server().addresses[0], QUESTION)

    assert (done.code, done.err) == (0, 'read_gauge {"place": "Ulm"}: 3 m\n')
    assert "3 m" in done.out


def test_a_reply_that_was_cut_calls_nothing(tool_addresses: Addresses) -> None:
    done = run_program(example("Tools"), tool_addresses.tcp, "cut short")

    assert done.code == 1
    assert "its calls may not be whole" in done.err
    assert "read_gauge {" not in done.err


def test_a_call_that_the_model_broke_off_is_told_to_it(tool_addresses: Addresses) -> None:
    done = run_program(example("Tools"), tool_addresses.tcp, "broken")

    assert done.code == 0
    assert "I heard that the arguments are no JSON object" in done.out
    assert 'read_gauge {"place": "Ulm"}' in done.err, "the whole one was run"


def test_a_choice_that_there_is_not() -> None:
    done = run_program(example("Tools"), "localhost:1", "--tool-choice", "often", "How high?")

    assert (done.code, done.out) == (1, "")
    assert "OFTEN" in done.err


def test_the_quick_start_from_the_artefact(addresses: Addresses, tmp_path: Path) -> None:
    """What it depends on comes from Maven's own folder, or is downloaded; but the artefact, whose
    version is the same after each change, from the new repository alone.
    """
    run(["scripts/packages-java.sh", str(tmp_path / "packages")], REPOSITORY)
    [folder] = (tmp_path / "packages/maven/dev/headrace/headrace-client").glob("*/")
    kinds = {one.name.split(folder.name)[-1] for one in folder.glob("*.jar")}
    assert kinds == {".jar", "-sources.jar", "-javadoc.jar"}
    [jar] = folder.glob(f"*{folder.name}.jar")
    names = zipfile.ZipFile(jar).namelist()
    assert "headrace/v1/generation.proto" in names
    assert "META-INF/LICENSE" in names
    assert not [name for name in names if "conformance" in name]

    readme = (JAVA / "README.md").read_text(encoding="utf-8")
    pom, program, command = (
        re.search(rf"```{kind}\n(.*?)```", readme, re.S) for kind in ("xml", "java", "console")
    )
    assert pom is not None
    assert program is not None
    assert command is not None
    fresh = tmp_path / "fresh"
    sources = fresh / "src" / "main" / "java"
    sources.mkdir(parents=True)
    there = pom[1].replace("/path/to/dist/packages/maven", f"{tmp_path}/packages/maven")
    (fresh / "pom.xml").write_text(there, encoding="utf-8")
    (sources / "Start.java").write_text(
        program[1].replace("localhost:50051", addresses.tcp), encoding="utf-8"
    )
    own = Path(os.environ.get("HOME", "/root"), ".m2", "repository")
    shutil.copytree(own, tmp_path / "m2", copy_function=os.link)
    shutil.rmtree(tmp_path / "m2" / "dev" / "headrace", ignore_errors=True)

    start = [*command[1].removeprefix("$ ").split(), f"-Dmaven.repo.local={tmp_path}/m2"]
    told = run([*start, "-B", "-ntp"], fresh)
    told = re.sub(r"\x1b\[[0-9;]*m", "", told)  # Maven resets the terminal's colours

    assert told.startswith("nce upon a timeOnce upon a timeO LENGTH 32\n")
    assert told.endswith("\nneOneOne\nwoTwoTwo\nhreeThre\n")
