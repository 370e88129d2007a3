"""`headrace top` shows the numbers of the same server's metrics."""

from __future__ import annotations

import re

import pytest
from headrace.cli.top import line, picture
from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from rich.console import Console

from engine.contract.errors import QueueFullError
from engine.contract.stats import AdapterStats, CallerStats, EngineStats
from engine.contract.types import CallerKey
from service.telemetry.metrics import POLL_S
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import refused, serving, spec
from tests.service.receivers import PAGE, samples, scraped

STATS = EngineStats(
    running=31, waiting=32, held=33, blocks_total=400, blocks_used=100, blocks_cached=34,
    host_blocks_total=50, host_blocks_used=35, steps=1001, prompt_tokens=1002,
    generated_tokens=1003, requests_accepted=1004, requests_finished=1005, preemptions=1006,
    offloads=1007, restores=1008, holds=1009, prefix_queries=2000, prefix_hits=500,
    steps_with_decodes=1010, steps_over_target=1011, last_step_s=0.0125, block_size=16,
    drafts=1014, draft_tokens=1015, accepted_draft_tokens=1016, steps_with_drafts=1017,
    history_draft_tokens=1018, accepted_history_draft_tokens=1019,
    prediction_draft_tokens=1020, accepted_prediction_draft_tokens=1021,
    grammar_draft_tokens=1022, accepted_grammar_draft_tokens=1023,
    states_total=60, states_used=36, states_kept=18, state_copies=1024, state_evictions=1025,
    prefix_tokens_without_state=1026,
    adapters=3, adapter_bytes=5 << 20, adapter_loads=1027, adapter_evictions=1028,
    max_adapters=70, max_adapter_bytes=9 << 20,
    by_adapter=(AdapterStats("team-a", 45, 46, 1029, 1030),),
    other_adapters=AdapterStats("", 47, 48, 1031, 1032),
    callers=(CallerStats(CallerKey("search"), 1.0, 41, 42, 1012),),
    other_callers=CallerStats(running=43, waiting=44, service=1013),
)  # fmt: skip

SHOWN = {
    "headrace_requests_running": r"([\d.]+) running",
    "headrace_requests_waiting": r"([\d.]+) waiting",
    "headrace_requests_held": r"([\d.]+) held",
    "headrace_requests_bytes": r"live \(([\d.]+) MiB\)",
    "headrace_requests_accepted_total": r"([\d.]+) requests accepted",
    "headrace_requests_finished_total": r"([\d.]+) finished",
    "headrace_sessions_open": r"([\d.]+) sessions",
    "headrace_kv_cache_usage": r"KV cache .*\| ([\d.]+)%",
    "headrace_kv_cache_blocks_used": r"KV cache .*: ([\d.]+) of",
    "headrace_kv_cache_blocks_limit": r"KV cache .* of ([\d.]+) blocks",
    "headrace_kv_cache_blocks_cached": r"([\d.]+) keep a prefix",
    "headrace_kv_cache_host_blocks_used": r"on the host .*: ([\d.]+) of",
    "headrace_kv_cache_host_blocks_limit": r"on the host .* of ([\d.]+) blocks",
    "headrace_states_limit": r"states .* of ([\d.]+) states",
    "headrace_states_used": r"states .*: ([\d.]+) of",
    "headrace_states_kept": r"states, ([\d.]+) keep a prefix",
    "headrace_states_copies_total": r"([\d.]+) were kept",
    "headrace_states_evictions_total": r"([\d.]+) gave way",
    "headrace_prefix_cache_without_state_total": r"([\d.]+) prompt tokens found no state",
    "headrace_adapters": r"adapters\s+([\d.]+) of \d+ loaded",
    "headrace_adapters_limit": r"adapters\s+\d+ of ([\d.]+) loaded",
    "headrace_adapters_memory_bytes": r"loaded \(([\d.]+) of [\d.]+ MiB\)",
    "headrace_adapters_memory_limit_bytes": r"loaded \([\d.]+ of ([\d.]+) MiB\)",
    "headrace_adapters_running": r"{headrace_adapter}: ([\d.]+) running",
    "headrace_adapters_waiting": r"{headrace_adapter}: \d+ running, ([\d.]+) waiting",
    "headrace_adapters_tokens_prompt_total": r"{headrace_adapter}: .* ([\d.]+) tokens of prompts",
    "headrace_adapters_tokens_generated_total": r"{headrace_adapter}: .* ([\d.]+) generated",
    "headrace_adapters_loads_total": r"([\d.]+) loads",
    "headrace_adapters_evictions_total": r"([\d.]+) gave way to others",
    "headrace_prefix_cache_hits_total": r"([\d.]+) of \d+ prompt tokens",
    "headrace_prefix_cache_queries_total": r"of ([\d.]+) prompt tokens",
    "headrace_steps_total": r"([\d.]+) steps,",
    "headrace_steps_with_decodes_total": r"([\d.]+) steps with decodes",
    "headrace_steps_over_target_total": r"([\d.]+) of \d+ steps with decodes",
    "headrace_drafts_total": r"([\d.]+) times in",
    "headrace_tokens_drafted_total": r"of ([\d.]+) tokens were right",
    "headrace_tokens_drafts_accepted_total": r"([\d.]+) of \d+ tokens were right",
    "headrace_tokens_drafted_history_total": r"history \d+ of ([\d.]+)",
    "headrace_tokens_drafts_accepted_history_total": r"history ([\d.]+) of",
    "headrace_tokens_drafted_grammar_total": r"grammar \d+ of ([\d.]+)",
    "headrace_tokens_drafts_accepted_grammar_total": r"grammar ([\d.]+) of",
    "headrace_tokens_drafted_prediction_total": r"prediction \d+ of ([\d.]+)",
    "headrace_tokens_drafts_accepted_prediction_total": r"prediction ([\d.]+) of",
    "headrace_steps_with_drafts_total": r"([\d.]+) steps with drafts",
    "headrace_tokens_prompt_total": r"([\d.]+) tokens of prompts",
    "headrace_tokens_generated_total": r"prompts, ([\d.]+) generated",
    "headrace_preemptions_total": r"([\d.]+) preemptions",
    "headrace_kv_cache_offloads_total": r"([\d.]+) offloads",
    "headrace_kv_cache_restores_total": r"([\d.]+) restores",
    "headrace_holds_total": r"([\d.]+) holds",
    "headrace_engine_restarts_total": r"engine restarts ([\d.]+)",
    "headrace_messages_unknown_fields_total": r"([\d.]+) messages with unknown fields",
    "headrace_callers_running": r"{headrace_caller}: ([\d.]+) running",
    "headrace_callers_waiting": r"{headrace_caller}: \d+ running, ([\d.]+) waiting",
    "headrace_callers_service_total": r"{headrace_caller}: .*\(([\d.]+)\)",
    "headrace_refusals_total": r"([\d.]+) {headrace_refusal_reason}",
    "headrace_startup_duration_seconds": r"started .*{headrace_startup_phase} ([\d.]+)",
    "headrace_server_phase": r"at \S+  {headrace_server_phase}(\n)",
}
"""Where `top` shows a gauge or counter; attributes stand in braces."""
SCALES = {
    "headrace_requests_bytes": 2**-20,
    "headrace_adapters_memory_bytes": 2**-20,
    "headrace_adapters_memory_limit_bytes": 2**-20,
    "headrace_kv_cache_usage": 100,
}
_DIFFERENT = r"(_bucket|_count|_sum|_created|_info)$|^headrace_openai_restarts_total$"
"""Of histograms, which have a time of their own: `top` shows the last step. The HTTP door is in no
statistics of the contract.
"""


class Busy(FakeEngine):
    """An engine with figures."""

    async def stats(self) -> EngineStats:
        return STATS


@pytest.mark.timeout(60 + POLL_S)
async def test_top_and_the_page_show_the_same_numbers() -> None:
    engine = Busy(script=says("abc"), auto=False)
    async with serving(engine, telemetry=PAGE, served_name="mine") as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="live")))
        for _ in range(3):
            engine.refuse_next.append(QueueFullError(5, 1.0))
            await refused(h.generate(spec()))
        await refused(h.generate(spec(model="another")))
        session = h.session()
        await session.add(spec(request_id="r"))
        await session.read()
        unknown = rpc.GenerateRequest(spec=spec(request_id=""))
        unknown.MergeFromString(bytes([0xC8, 0x3E, 1]))  # field 1001
        unknown.spec.sampling.temperature = -1
        await refused(h.generation.Generate(unknown))
        page = await scraped(h.server)
        while "headrace_steps_total" not in page:
            page = await scraped(h.server)  # the engine is asked once a second
        found = (await h.control.GetStatistics(pb.GetStatisticsRequest())).statistics
        engine.run()
        await session.end()
    console = Console(width=250, color_system=None)
    with console.capture() as capture:
        console.print(picture(found, "here"))
    said = capture.get()

    told = set()
    for (name, labels), number in samples(page).items():
        if not name.startswith("headrace_") or re.search(_DIFFERENT, name):
            continue
        told.add(name)
        has = {label: re.escape(value) for label, value in labels}
        has["headrace_caller"] = has.get("headrace_caller") or "all others"
        has["headrace_adapter"] = has.get("headrace_adapter") or "all other adapters"
        shown = re.search(SHOWN[name].format(**has), said)
        if name == "headrace_server_phase":
            assert (shown is not None) == bool(number), (labels, said)
            continue
        if name == "headrace_startup_duration_seconds" and number < 0.05:
            assert shown is None, (labels, said)
            continue
        assert shown is not None, (name, labels, said)
        assert float(shown[1]) == pytest.approx(number * SCALES.get(name, 1), abs=0.051), name
    assert told == set(SHOWN)
    assert "last step     12.5 ms" in said
    assert "running=31 waiting=32 blocks=100/400" in line(found)
    assert "held=33 kv=25.0% states=36/60 prefix-hits=25.0% refused=5" in line(found)
