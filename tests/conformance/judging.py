"""Whether what a driver has told is right: compared with what the servers have sent, or with what
the vector says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.folding import (
    chunks_of,
    difference,
    told_result,
    whole_chunk,
    whole_result,
)
from tests.conformance.stage import Served, Stage, Unmet


@dataclass
class Handle:
    """A handle of the driver."""

    name: str
    """The request's name in the vector."""
    first: int = 0
    """How many of the request's events came before it."""
    read: int = 0
    """How many chunks it has read."""
    text: str = ""
    """Of a real server's request: what its chunks had, joined."""
    token_ids: list[int] = field(default_factory=list)


class Judge:
    """Compares the answers of one vector's commands.

    Attributes:
        handles: the driver's, by their names in the vector.
        requests: what the driver was told of each request, by its name.
        ids: the requests' ids, by their names.
    """

    def __init__(self, stage: Stage, is_real: bool, make_id: Callable[[str], str]) -> None:
        self.handles: dict[str, Handle] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.ids: dict[str, str] = {}
        self._stage = stage
        self._is_real = is_real
        self._make_id = make_id

    def id_of(self, name: str) -> str:
        """The id of the request that a vector calls so."""
        if name not in self.ids:
            self.ids[name] = self._make_id(name)
        return self.ids[name]

    def served(self, name: str) -> Served:
        """The request as the server has it."""
        found = self._stage.served.get(self.id_of(name))
        if found is None:
            raise Unmet(f"no server has request {name}")
        return found

    def judge(self, told: dict[str, Any], step: dict[str, Any]) -> None:
        """Looks at a command's answer.

        Raises:
            Unmet: it is not right.
        """
        wanted = step.get("expect", {})
        if "error" in told and "foreign" in told["error"]:
            raise Unmet(f"an error that is not of the library's: {told['error']['foreign']}")
        if "chunks" in told and "error" in told:
            self._compare_chunks(told["chunks"], step)
        if "error" in wanted:
            self._compare_error(told, wanted, step)
            return
        if "error" in told:
            raise Unmet(f"an error: {json.dumps(told['error'], ensure_ascii=False)[:600]}")
        ok = told.get("ok")
        if not isinstance(ok, dict):
            raise Unmet(f"an answer without ok: {told}")
        self._compare_ok(ok, step, wanted)

    def _compare_ok(self, ok: dict[str, Any], step: dict[str, Any], wanted: dict[str, Any]) -> None:
        op = step["op"]
        if self._is_real and op in ("result", "generate", "get_result"):
            self._compare_echo(whole_result(ok)["choices"][0], self._handle_of(step), wanted)
        elif op in ("result", "generate", "get_result"):
            self._compare_result(ok, self._handle_of(step))
        elif self._is_real and op == "read":
            self._take_echo(ok, step)
        elif op == "read":
            self._compare_chunks(ok.get("chunks") or [], step)
            end = ok.get("end")
            if end is not wanted.get("end", "chunks" not in step):
                raise Unmet(f"end is {end}")
        elif op == "batch":
            self._compare_outcomes(ok["outcomes"], step)
        elif op in ("submit", "add_request"):
            name = self._handle_of(step).name
            if "id" not in self.requests[name]:
                self.ids[name] = ok["request_id"]
            elif ok["request_id"] != self.id_of(name):
                raise Unmet(f"the request's id is {ok['request_id']}")
        if found := difference(wanted.get("ok", {}), ok, "ok"):
            raise Unmet(found)
        if "contents" in wanted:
            self._compare_contents(ok, wanted["contents"])
        if "statuses" in wanted:
            statuses = {self.id_of(one): status for one, status in wanted["statuses"].items()}
            if found := difference(statuses, ok["statuses"], "statuses"):
                raise Unmet(found)

    def _compare_contents(self, ok: dict[str, Any], sources: Sequence[str]) -> None:
        """The digests of adapters that a real server has loaded from these sources."""
        from tests.conformance.real import adapter_digest

        adapters = ok.get("adapters", [ok["adapter"]] if "adapter" in ok else [])
        told = [one.get("digest") for one in adapters]
        if "choices" in ok:
            told = [ok.get("adapter_digest")]
        right = [adapter_digest(self.id_of(source)) for source in sources]
        if found := difference(right, told, "digests"):
            raise Unmet(found)

    def _compare_echo(self, choice: dict[str, Any], handle: Handle, wanted: dict[str, Any]) -> None:
        """A real server's output is the prompt, over and over."""
        from tests.conformance.real import echo

        request = self.requests[handle.name]
        right = echo(request["text"], request["max_tokens"])
        if wanted.get("cancelled"):
            count = len(choice["token_ids"])
            said = choice["text"].rstrip("\ufffd")  # the end may be within a character
            if not right["text"].startswith(said) or count >= request["max_tokens"]:
                raise Unmet("the output is not the beginning of the right one")
            right = {"token_ids": right["token_ids"][:count], "finish_reason": "cancelled"}
        if found := difference(right, choice, handle.name):
            raise Unmet(found)

    def _take_echo(self, ok: dict[str, Any], step: dict[str, Any]) -> None:
        handle = self._handle_of(step)
        for told in ok["chunks"]:
            chunk = whole_chunk(told)
            handle.text += chunk["text"]
            handle.token_ids += chunk["token_ids"]
        if ok["end"]:
            usage = {"completion_tokens": len(handle.token_ids)}
            told = {"text": handle.text, "token_ids": handle.token_ids, "usage": usage}
            wanted = {"finish_reason": "length", **told}
            self._compare_echo(wanted, handle, {})
        elif len(ok["chunks"]) != step["chunks"]:
            raise Unmet(f"{len(ok['chunks'])} chunks; {step['chunks']} were asked for")

    def _handle_of(self, step: dict[str, Any]) -> Handle:
        if "handle" in step and step["handle"] in self.handles:
            return self.handles[step["handle"]]
        told = step.get("request", step.get("of"))
        return Handle(told if isinstance(told, str) else told["name"])

    def _result_of(self, handle: Handle) -> dict[str, Any]:
        served = self.served(handle.name)
        return told_result(served.log[handle.first :], served.request_id, served.n)

    def _compare_result(self, told: dict[str, Any], handle: Handle, what: str = "result") -> None:
        result, right = whole_result(told), self._result_of(handle)
        if result["seed"] is None:
            right["seed"] = None
        if found := difference(right, result, what):
            raise Unmet(found)

    def _compare_chunks(self, told: Sequence[dict[str, Any]], step: dict[str, Any]) -> None:
        handle = self._handle_of(step)
        served = self._stage.served.get(self.id_of(handle.name))  # none, if it was refused
        log = served.log if served is not None else []
        right = chunks_of(log[handle.first :])[handle.read :]
        count = step.get("chunks", len(right))
        if "error" in step.get("expect", {}):
            count = len(right)
        if found := difference(right[:count], [whole_chunk(one) for one in told], "chunks"):
            raise Unmet(found)
        handle.read += len(told)

    def _compare_error(
        self, told: dict[str, Any], wanted: dict[str, Any], step: dict[str, Any]
    ) -> None:
        if "error" not in told:
            shown = json.dumps(told.get("ok"), ensure_ascii=False)[:400]
            raise Unmet(f"no error, but {shown}")
        error = told["error"]
        right = dict(wanted["error"])
        partial = right.pop("partial", None)
        if right.get("request_id"):
            right["request_id"] = self.id_of(right["request_id"])
        if found := difference(right, error, "error"):
            raise Unmet(found)
        if partial is not None:
            self._compare_result(error.get("partial") or {}, self._handle_of(step), "partial")

    def _compare_outcomes(self, outcomes: Sequence[dict[str, Any]], step: dict[str, Any]) -> None:
        names = [one if isinstance(one, str) else one["name"] for one in step["requests"]]
        if sorted(one["index"] for one in outcomes) != list(range(len(names))):
            raise Unmet(f"outcomes of {[one['index'] for one in outcomes]}")
        if step.get("ordered") and [one["index"] for one in outcomes] != list(range(len(names))):
            raise Unmet("outcomes are not in the order of their requests")
        errors = step.get("expect", {}).get("errors", {})
        for one in outcomes:
            name = names[one["index"]]
            if name in errors:
                if found := difference(errors[name], one.get("error") or {}, f"{name}.error"):
                    raise Unmet(found)
            elif "result" in one and self._is_real:
                self._compare_echo(whole_result(one["result"])["choices"][0], Handle(name), {})
            elif "result" in one:
                self._compare_result(one["result"], Handle(name), name)
            else:
                raise Unmet(f"{name} has the error {one.get('error')}")
