"""What `make test-versions` runs, in which order, and what it says of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from scripts import test_versions as script

SETTINGS = {"UV_DEFAULT_INDEX": "https://packages.example/simple"}


class Recorder:
    """Notes commands; those that contain `failing` fail."""

    def __init__(self, failing: str = "nothing does") -> None:
        self.commands: list[str] = []
        self._failing = failing

    def __call__(self, command: Sequence[str], more: Mapping[str, str]) -> int:
        text = " ".join(command)
        self.commands.append(text)
        assert more == (SETTINGS if "pip install" in text else {})
        return int(self._failing in text)


def test_each_end_is_made_and_tested(capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorder()
    assert script.check(["lowest", "newest"], run, SETTINGS, ["tests/engine/models"]) == 0
    made = [one for one in run.commands if "uv venv" in one]
    assert ["--resolution lowest-direct" in one for one in made] == [True, False]
    assert ["--resolution highest" in one for one in made] == [False, True]
    tested = [one for one in run.commands if "-m pytest" in one]
    for name, command in zip(("lowest", "newest"), tested, strict=True):
        assert command.startswith(f"{script.FOLDER}/{name}/bin/python ")
        assert command.endswith("tests/engine/models")
    assert capsys.readouterr().out.endswith("==> lowest: passed\n==> newest: passed\n")


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("versions/lowest/bin/python -m pytest", "tests failed, or pytest did not come to its end"),
        ("lowest-direct", "the environment could not be made; uv has said why"),
    ],
)
def test_the_second_end_is_tested_though_the_first_failed(
    failing: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recorder(failing)
    assert script.check(["lowest", "newest"], run, SETTINGS, ["tests"]) == 1
    assert "versions/newest/bin/python -m pytest" in run.commands[-1]
    assert f"==> lowest: {said}\n==> newest: passed\n" in capsys.readouterr().out


def test_without_room_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(SystemExit, match="2"):
        script.main([])
    assert "GiB are free on the disk" in capsys.readouterr().err


def test_every_test_that_it_names_is_there() -> None:
    assert all((script.ROOT / one).exists() for one in script.TESTS)
