"""Which format a template writes, and which special tokens its parser is shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from engine.contract.errors import ConfigError
from engine.contract.option_fields import options_of
from engine.text import Tokenizer
from service.config import ServiceConfig
from service.replies import FORMATS, format_option, special_marks


def test_the_options_values_are_the_formats_names() -> None:
    choices = options_of(ServiceConfig)["reply_parser"].choices
    assert set(choices) == {"auto", "none", "response_template", *FORMATS}


def test_special_marks_are_those_that_are_special_tokens() -> None:
    backend = Backend(models.WordLevel({"a": 0, "<think>": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<tool_call>", special=True)])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = Tokenizer(backend)
    assert special_marks(FORMATS["hermes"], tokenizer) == {
        tokenizer.token_id("<tool_call>"): "<tool_call>"
    }
    assert special_marks(FORMATS["mistral"], tokenizer) == {}


OUTSIDE = """
from service.replies.format import marked

FORMAT = marked("own", {}, reasoning=("<hm>", "</hm>"))
number = 1
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of somebody else's; its name."""
    (tmp_path / "somebody_s_replies.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "somebody_s_replies"
    sys.modules.pop("somebody_s_replies", None)


def test_a_format_from_outside_the_tree(outside: str) -> None:
    name = f"{outside}:FORMAT"
    assert ServiceConfig(reply_parser=name).reply_parser == name
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<hm>", special=True)])
    tokenizer = Tokenizer(backend)
    found = format_option(name)(tokenizer)
    assert found is not None
    assert found.format.name == "own"
    assert found.shown == {tokenizer.token_id("<hm>"): "<hm>"}
    assert format_option(name)(None) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("{}:number", "which is no Format"),
        ("{}:NOTHING", "package.module:NAME, of a module that is installed"),
        ("no_such_module_{}:FORMAT", "cannot be imported"),
    ],
)
def test_a_format_from_outside_that_is_none_is_refused(outside: str, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        format_option(name.format(outside))
    assert error.value.option == "reply_parser"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of auto, none, .*, or package\.module:NAME"):
        ServiceConfig(reply_parser="other")
