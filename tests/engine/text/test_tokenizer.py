"""The tokenizer against transformers' own on the same files, and single tokens' bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.contract.errors import HeadraceError, InvalidRequestError
from engine.text import Tokenizer, TokenizerError

SHARED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            ["<|im_start|>", "<|eos|>", "<s>", "[SEP]", " ", "the", "wheel", "\n", "水"]
        )
    ).map("".join),
)


@pytest.fixture(scope="session")
def references(directories: dict[str, Path]) -> dict[str, Any]:
    """transformers' tokenizers of the same directories."""
    return {k: PreTrainedTokenizerFast.from_pretrained(d) for k, d in directories.items()}


@SHARED
@given(text=texts, special=st.booleans())
def test_encodes_as_transformers(
    tokenizer: Tokenizer, references: dict[str, Any], kind: str, text: str, special: bool
) -> None:
    expected = references[kind].encode(text, add_special_tokens=special)
    assert tokenizer.encode(text, add_special_tokens=special) == expected


@SHARED
@given(ids=st.lists(st.integers(0, 90), max_size=20), skip=st.booleans())
def test_decodes_as_transformers(
    tokenizer: Tokenizer, references: dict[str, Any], kind: str, ids: list[int], skip: bool
) -> None:
    expected = references[kind].decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_names_special_tokens_as_transformers(
    tokenizer: Tokenizer, references: dict[str, Any], kind: str
) -> None:
    assert tokenizer.special_tokens == references[kind].special_tokens_map
    assert tokenizer.eos_token == references[kind].eos_token
    assert tokenizer.bos_token == references[kind].bos_token
    assert tokenizer.unk_token == references[kind].unk_token
    assert tokenizer.pad_token == references[kind].pad_token
    assert tokenizer.special_token_ids == set(references[kind].all_special_ids) | {
        i for i, t in references[kind].added_tokens_decoder.items() if t.special
    }


def test_tokens_of_the_configuration_are_added(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """A directory whose tokenizer.json lacks what tokenizer_config.json has."""
    shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "pad_token": "<|pad|>",
        "image_token": "<|image|>",
        "video_token": {"__type": "AddedToken", "content": "<|video|>", "lstrip": True},
        "other_token": {"content": "<|other|>"},
        "additional_special_tokens": ["<|more|>"],
    }
    path.write_text(json.dumps(config))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "a <|pad|> b<|image|><|more|>c <|video|> <|other|>"
    assert tokenizer.encode(text) == reference.encode(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert tokenizer.vocab_size == len(reference)


def test_older_directories(directories: dict[str, Path], tmp_path: Path) -> None:
    """Special tokens in special_tokens_map.json, and a saved truncation and padding."""
    path = tmp_path / "tokenizer.json"
    content = json.loads((directories["llama_like"] / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert len(tokenizer.encode("the wheel turns while the water runs")) > 4
    assert not tokenizer.has_chat_template


@SHARED
@given(text=texts)
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, kind: str, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if kind == "word_piece":
        return  # its decoder also cleans up blanks
    ids = [i for i in ids if i not in tokenizer.special_token_ids]
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    whole = tokenizer.decode(ids)
    assert whole in (joined, joined.removeprefix(" "))


def test_single_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    byte_level, llama = tokenizers["byte_level"], tokenizers["llama_like"]
    (water,) = byte_level.encode(" water", add_special_tokens=False)
    assert byte_level.token_bytes(water) == b" water"
    assert byte_level.token_text(water) == " water"
    assert byte_level.token_bytes(2) == b"<|im_start|>"
    part = byte_level.encode("한", add_special_tokens=False)[0]
    assert byte_level.token_text(part) == "\ufffd"
    wheel = llama.token_id("▁wheel")
    assert wheel is not None
    assert llama.token_bytes(wheel) == b" wheel"
    assert llama.token_bytes(3 + 0xC3) == b"\xc3"
    assert llama.token_bytes(1) == b"<s>"
    pieces = tokenizers["word_piece"]
    ids = pieces.encode("the wheelt", add_special_tokens=False)
    assert b"".join(map(pieces.token_bytes, ids)) == b" the wheelt"
    assert llama.token_id("nowhere") is None


def test_ids_beyond_the_tokenizer(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_level"], vocab_size=1000)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.token_bytes(999) == b""
    assert tokenizer.token_text(999) == ""
    assert tokenizer.decode([999]) == ""
    for token_id in (-1, 1000, 2**40):
        with pytest.raises(InvalidRequestError, match="token id"):
            tokenizer.token_bytes(token_id)
    for token_id in (-1, 2**40):
        with pytest.raises(InvalidRequestError, match="token_ids"):
            tokenizer.decode([token_id])


def test_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        tokenizer.encode("a\ud800b")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="save_pretrained") as caught:
        Tokenizer.load(tmp_path)
    assert isinstance(caught.value, HeadraceError)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"added_tokens_decoder": {"x": 1}}', '{"chat_template": [1]}']
)
def test_a_broken_configuration(directories: dict[str, Path], tmp_path: Path, content: str) -> None:
    shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_threads_share_one_tokenizer(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_level"])
    text = "the wheel turns while 水 runs "

    def work(_: int) -> tuple[list[int], list[bytes]]:
        ids = tokenizer.encode(text * 20)
        return ids, [tokenizer.token_bytes(i) for i in ids]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(16)))
    assert all(result == results[0] for result in results)


def test_needs_neither_torch_nor_transformers(directories: dict[str, Path]) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "sys.modules['transformers'] = None\n"
        "from engine.text import TextStream, Tokenizer\n"
        f"t = Tokenizer.load({str(directories['byte_level'])!r})\n"
        "s = TextStream(t)\n"
        "print(s.push(t.encode(t.apply_chat_template([{'role': 'user', 'content': 'hi'}]))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert "hi" in done.stdout


def test_added_tokens_of_older_directories(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(directories["byte_level"] / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "sep_token": "<q>"}')
    size = Tokenizer.load(tmp_path).vocab_size
    added = {"<p>": size + 1, "<q>": size, "<|eos|>": 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a<p>b <q> c<|eos|>")
    assert ids == reference.encode("a<p>b <q> c<|eos|>")
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(tokenizer: Tokenizer, way: str) -> None:
    """The interpreter's lock is given back meanwhile. Threads here take it from none that does not
    give it back, so that another one counts during the work only if it is.
    """
    text = "the wheel turns " * 5000
    ids = tokenizer.encode(text)
    work = {"encode": lambda: tokenizer.encode(text), "decode": lambda: tokenizer.decode(ids)}[way]
    count = 0
    during: list[int] = []

    def run() -> None:
        for _ in range(5):
            before = count
            work()
            during.append(count - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(run)
            while not running.done():
                count += 1
                time.sleep(0)  # gives the lock back
            running.result()
    finally:
        sys.setswitchinterval(interval)
    assert sum(during) > 0
