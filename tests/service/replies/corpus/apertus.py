"""Apertus: a list of objects of which the only key is the tool's name."""

from __future__ import annotations

from tests.service.replies.cases import Case, cases_of_lists

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
KEPT = {"nothing", "text", "an empty list", "the mark alone", "text behind the mark", "no object"}


def wrap(name: str, arguments: str) -> str:
    return f'{BEGIN}[{{"{name}": {arguments}}}]{END}'


WRAPS = [wrap]
CALL, CALLED = wrap("f", '{"a": 1}'), ("f", '{"a": 1}')
CASES = [
    *(case for case in cases_of_lists(BEGIN, END) if case.id in KEPT),
    Case("a call", CALL, calls=[CALLED]),
    Case("two", f'{BEGIN}[{{"f": {{"a": 1}}}}, {{"g": {{}}}}]{END}', calls=[CALLED, ("g", "{}")]),
    Case("laid out", f'{BEGIN}\n[\n {{ "f" : {{}} }}\n]\n{END}', calls=[("f", "{}")]),
    Case("reasoning", f"<|inner_prefix|>hm<|inner_suffix|>hi{CALL}", "hi", "hm", [CALLED]),
    Case("opened", f"hm<|inner_suffix|>{CALL}", "", "hm", [CALLED], in_reasoning=True),
    Case("text around", f"hi\n{CALL}\nbye", "hibye", calls=[CALLED]),
    Case("no arguments", f'{BEGIN}[{{"f": 1}}]{END}', f'{BEGIN}[{{"f": 1}}]{END}'),
    Case("two keys", f'{BEGIN}[{{"f": {{}}, "g": 1}}]{END}', calls=[("f", "{}")]),
    Case("no key", f"{BEGIN}[{{}}]{END}", f"{BEGIN}[{{}}]{END}"),
    Case("ended", f'{BEGIN}[{{"f": {{"a', calls=[("f", '{"a', False)]),
]
TRUNCATED = f"<|inner_prefix|>hm<|inner_suffix|>hi{CALL}"
