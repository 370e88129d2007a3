"""deploy/compose: its form, and that its parts fit each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.command.flags import flags
from tests.deploy.shutdown import REST_S
from tests.deploy.valid import check_compose
from tests.service.readme import ROOT

FOLDER = ROOT / "deploy" / "compose"


def read(name: str) -> Any:
    """One of its files."""
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")


def test_it_is_what_compose_reads_and_its_files_are_there() -> None:
    check_compose(COMPOSE)
    for config in COMPOSE["configs"].values():
        assert (FOLDER / config["file"]).is_file()
    for service in COMPOSE["services"].values():
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_the_server_has_options_that_there_are_and_time_to_drain() -> None:
    server = COMPOSE["services"]["headrace"]
    told = server["environment"]
    ours = {name for name in told if name.startswith("HEADRACE_")}
    assert ours <= {flag.variable for flag in flags().values()}
    patience_s = float(server["stop_grace_period"].removesuffix("s"))
    assert patience_s >= float(told["HEADRACE_DRAIN_TIMEOUT"]) + REST_S


def test_spans_and_scrapes_go_where_somebody_listens() -> None:
    told = COMPOSE["services"]["headrace"]["environment"]
    host, port = told["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://").split(":")
    assert host in COMPOSE["services"]
    receiver = read("collector.yaml")["receivers"]["otlp"]["protocols"]["grpc"]
    assert receiver["endpoint"].endswith(f":{port}")
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["job_name"] == "headrace"
    assert job["static_configs"] == [{"targets": ["headrace:9464"]}]
    (source,) = read("grafana/datasource.yaml")["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in COMPOSE["services"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    alerts = tmp_path / "alerts.yaml"
    shutil.copy(ROOT / "deploy" / "prometheus" / "alerts.yaml", alerts)
    config = read("prometheus.yaml")
    assert config["rule_files"] == ["/etc/prometheus/alerts.yaml"]
    config["rule_files"] = [str(alerts)]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    subprocess.run(run, check=True)
