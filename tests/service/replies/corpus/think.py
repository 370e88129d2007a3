"""Reasoning alone."""

from __future__ import annotations

from tests.service.replies.cases import Case

CASES = [
    Case("nothing", ""),
    Case("text", "hi", "hi"),
    Case("blanks alone", "\n\n", "\n\n"),
    Case("reasoning and text", "<think>\nhm\n</think>\n\nhi\n", "hi\n", "hm"),
    Case("no blanks", "<think>hm</think>hi", "hi", "hm"),
    Case("blanks before", "\n <think>hm</think>hi", "hi", "hm"),
    Case("reasoning alone", "<think>hm</think>", "", "hm"),
    Case("never closed", "<think>hm", "", "hm"),
    Case("never closed, blanks", "<think>hm\n", "", "hm\n"),
    Case("empty", "<think></think>hi", "hi"),
    Case("empty, blanks", "<think>\n\n</think>\n\nhi", "hi"),
    Case("opened and ended", "<think>"),
    Case("opened by the prompt", "hm\n</think>\n\nhi", "hi", "hm", in_reasoning=True),
    Case("opened, closed at once", "</think>hi", "hi", in_reasoning=True),
    Case("opened, never closed", "hm", "", "hm", in_reasoning=True),
    Case("opened, nothing", "", in_reasoning=True),
    Case("opened twice", "<think>hm</think>hi", "hi", "<think>hm", in_reasoning=True),
    Case("inner blanks are kept", "<think>a\n\n b</think>c\n d", "c\n d", "a\n\n b"),
    Case("twice", "<think>a</think>\n<think>b</think>c", "c", "ab"),
    Case("after text", "a<think>b</think>c", "a<think>b</think>c"),
    Case("mentioned", "The <think> mark.", "The <think> mark."),
    Case("closed and not opened", "a</think>b", "a</think>b"),
    Case("closed twice", "<think>a</think></think>b", "</think>b", "a"),
    Case("opened within", "<think>a<think>b</think>c", "c", "a<think>b"),
    Case("close begun", "<think>a</thi", "", "a</thi"),
    Case("close begun twice", "<think>a</thi</</think>b", "b", "a</thi</"),
    Case("open begun", "<thi", "<thi"),
    Case("open begun twice", "<thi<think>a</think>", "<thi<think>a</think>"),
    Case("other marks", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Case("angle brackets", "a < b <= c << d <", "a < b <= c << d <"),
    Case("not ASCII", "<think>日本</think>🙂é", "🙂é", "日本"),
    Case("upper case", "<THINK>a</THINK>", "<THINK>a</THINK>"),
    Case("many blanks behind", "<think>a</think>" + "\n" * 70 + "b", "\n" * 6 + "b", "a"),
    Case("many blanks before", "<think>a" + "\n" * 70 + "</think>b", "b", "a" + "\n" * 6),
]
TRUNCATED = "<think>\nhm </thin\n</think>\n\nhi <think>"
