"""The engine's statistics are those of the contract, which has their names and kinds."""

from __future__ import annotations

import re
from dataclasses import fields

from headrace.v1 import control_service_pb2 as pb

from engine.contract.stats import (
    STATISTICS,
    AdapterStats,
    CallerStats,
    EngineStats,
    Statistic,
    statistics_of,
)
from service.convert.control_messages import engine_statistics
from service.telemetry.figures import Figures
from tests.service.readme import ROOT

CONTRACT = (ROOT / "protos" / "headrace" / "v1" / "control_service.proto").read_text()


def comments(message: str) -> dict[str, str]:
    """The comments of a message's fields."""
    body = CONTRACT.partition(f"\nmessage {message} {{\n")[2].partition("\n}")[0]
    found = re.findall(r"((?:  // .*\n)+)  (?:repeated )?[\w.<>, ]+ (\w+) = \d+;", body)
    return {name: re.sub(r"\s*// ", " ", text).strip() for text, name in found}


def test_the_contract_has_the_kind_of_every_statistic() -> None:
    for message, declared in (
        (pb.EngineStatistics, statistics_of(EngineStats)),
        (pb.CallerStatistics, statistics_of(CallerStats)),
        (pb.AdapterStatistics, statistics_of(AdapterStats)),
    ):
        told = comments(message.DESCRIPTOR.name)
        assert told.keys() == set(message.DESCRIPTOR.fields_by_name)
        counters = {name for name, text in told.items() if text.startswith("Counter: ")}
        assert counters == {
            name for name, one in declared.items() if one.kind == "counter" and name in told
        }


def test_the_contract_has_every_statistic_by_its_field_or_by_its_name() -> None:
    declared = statistics_of(EngineStats)
    values = {name: number for number, name in enumerate(declared, 1)}
    snapshot = EngineStats(**values)
    message = engine_statistics(snapshot)
    told = {
        **dict(message.others),
        **{
            declared[one.name].name: value
            for one, value in message.ListFields()
            if one.name in declared
        },
    }
    assert told == {declared[name].name: value for name, value in values.items()}


def test_the_engine_has_every_statistic_of_the_contract() -> None:
    own = {"last_step_duration", "others"}
    told = {one.name for one in pb.EngineStatistics.DESCRIPTOR.fields} - own
    assert told <= {one.name for one in fields(EngineStats)}
    assert {one.name for one in pb.CallerStatistics.DESCRIPTOR.fields} == {
        one.name for one in fields(CallerStats)
    }
    assert {one.name for one in pb.AdapterStatistics.DESCRIPTOR.fields} == {
        one.name for one in fields(AdapterStats)
    }


def test_names_units_and_texts_have_one_form() -> None:
    every: list[Statistic] = [
        *STATISTICS.values(),
        *statistics_of(CallerStats).values(),
        *statistics_of(AdapterStats).values(),
        *statistics_of(Figures).values(),
    ]
    assert len({one.name for one in every}) == len(every)
    for one in every:
        assert re.fullmatch(r"headrace(\.[a-z_]+)+", one.name), one
        assert re.fullmatch(r"1|s|By|\{[a-z]+\}", one.unit), one
        assert re.fullmatch(r"\S.*\.", one.text), one
