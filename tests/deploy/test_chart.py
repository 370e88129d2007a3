"""deploy/helm with every option, and the sidecar: their schemas, and what belongs together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml

from service.command.flags import flags
from service.server import server
from tests.campaign.fleet.rollout import PodSettings, Rollout
from tests.deploy.chart import CHART, NEEDS_HELM, RefusedError, only, rendered
from tests.deploy.shutdown import REST_S
from tests.deploy.valid import check_object
from tests.service.readme import ROOT

CLAIM = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
FILL = {"repository": "who/what", "claim": "models", "tokenSecret": "hub"}
VALUES: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "a digest": {"image": {"repository": "here/headrace", "digest": f"sha256:{'0' * 64}"}},
    "a registry": {"imagePullSecrets": [{"name": "registry"}], "image": {"tag": "1"}},
    "a claim": {"model": {"name": "/models/mine", "volume": CLAIM}},
    "a claim that is filled": {"model": {"name": "/models/mine", "volume": CLAIM, "fill": FILL}},
    "an image with the model": {
        "model": {"name": "/models", "volume": {"hostPath": {"path": "/srv/models"}}}
    },
    "variables": {"env": {"HEADRACE_MAX_QUEUE_SIZE": "64", "HF_TOKEN_PATH": "/tmp/t"}},
    "times": {"drainSeconds": 600, "preStopSeconds": 12, "maxConnectionAgeSeconds": 0},
    "TLS and callers": {"tls": {"secret": "tls"}, "callers": {"secret": "callers"}},
    "OpenAI's API": {"openai": {"enabled": True, "port": 8080, "hosts": ["llm.example"]}},
    "mutual TLS": {"tls": {"secret": "tls", "clientCa": True}},
    "a GPU": {
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "32Gi"}},
        "runtimeClassName": "nvidia",
        "priorityClassName": "serving",
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "tmpSize": "4Gi",
    },
    "no spreading": {"topologySpreadConstraints": []},
    "marks": {"podLabels": {"team": "search"}, "podAnnotations": {"a.b/c": "d"}},
    "no budget": {"disruptionBudget": {"enabled": False}},
    "a budget in percent": {"disruptionBudget": {"maxUnavailable": "25%"}},
    "no policy": {"networkPolicy": {"enabled": False}},
    "a policy": {
        "networkPolicy": {
            "callers": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}],
            "scrapers": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}],
        }
    },
    "no metrics": {"telemetry": {"prometheus": False}},
    "telemetry": {
        "telemetry": {
            "podMonitor": True,
            "otlpEndpoint": "http://collector:4317",
            "otlpMetrics": True,
            "env": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"},
        }
    },
    "scaling": {"autoscaling": {"enabled": True}, "telemetry": {"podMonitor": True}},
    "a gateway": {
        "route": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["text.example"]}
    },
    "a gateway, with TLS": {
        "route": {"enabled": True, "parentRefs": [{"name": "edge"}]},
        "tls": {"secret": "tls"},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a word that there is not": ({"replica": 3}, "replica"),
    "a variable that the chart sets": ({"env": {"HEADRACE_DRAIN_TIMEOUT": "5"}}, "DRAIN_TIMEOUT"),
    "a filled claim without its name": ({"model": {"fill": {"repository": "a/b"}}}, "fill.claim"),
    "a route to nowhere": ({"route": {"enabled": True}}, "parentRefs"),
    "a variable that is a list": ({"env": {"HEADRACE_LISTEN_ON": ["a"]}}, "LISTEN_ON"),
    "clients' certificates without TLS": ({"tls": {"clientCa": True}}, "secret"),
    "OpenAI's API with clients' certificates": (
        {"openai": {"enabled": True}, "tls": {"secret": "tls", "clientCa": True}},
        "clientCa",
    ),
    "OpenAI's API on a port that is taken": ({"openai": {"port": 50051}}, "port"),
    "metrics to nowhere": ({"telemetry": {"otlpMetrics": True}}, "otlpEndpoint"),
    "scaling without metrics": (
        {"autoscaling": {"enabled": True}, "telemetry": {"prometheus": False}},
        "telemetry.prometheus",
    ),
    "scaling down before clients have come": (
        {"autoscaling": {"enabled": True, "scaleDownSeconds": 600}},
        "maxConnectionAgeSeconds",
    ),
}


def own_container(pod: dict[str, Any]) -> dict[str, Any]:
    """The server's container of a pod's spec."""
    every = [*pod.get("initContainers", ()), *pod["containers"]]
    (found,) = [one for one in every if one["name"] == "headrace"]
    return found


def variables(pod: dict[str, Any]) -> dict[str, str]:
    """What the server's container is told by variables with a value."""
    return {one["name"]: one["value"] for one in own_container(pod)["env"] if "value" in one}


def check_options(told: dict[str, str]) -> None:
    """That every HEADRACE_ variable is an option of the server."""
    ours = {name for name in told if name.startswith("HEADRACE_")}
    assert ours <= {flag.variable for flag in flags().values()}


@NEEDS_HELM
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_option_renders_objects_that_clusters_know(values: dict[str, Any]) -> None:
    things = rendered(values)
    assert {"Deployment", "Service"} <= {thing["kind"] for thing in things}
    for thing in things:
        check_object(thing)
    pod = only(things, "Deployment")["spec"]["template"]["spec"]
    check_options(variables(pod))
    mounted = {mount["name"] for mount in own_container(pod)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@NEEDS_HELM
def test_numbers_and_booleans_of_variables_become_their_text() -> None:
    """`--set env.X=64` gives Helm an integer, and a values file a float."""
    set_ones = ("--set", "env.HEADRACE_MAX_QUEUE_SIZE=64,env.HEADRACE_PREFIX_CACHE=false")
    given = {
        "env": {
            "HEADRACE_MAX_LIVE_BYTES": 104857600,
            "HEADRACE_TARGET_STEP_TIME": 0,
            "HEADRACE_MAX_MEMORY_PERCENT": 0.25,
            "HEADRACE_IN_PROCESS": True,
            "HEADRACE_LOG_LEVEL": "info",
        },
        "telemetry": {"env": {"OTEL_TRACES_SAMPLER_ARG": 0.1}},
    }
    things = rendered(given, *set_ones)
    told = variables(only(things, "Deployment")["spec"]["template"]["spec"])
    check_options(told)
    assert (
        told
        | {
            "HEADRACE_MAX_QUEUE_SIZE": "64",
            "HEADRACE_PREFIX_CACHE": "false",
            "HEADRACE_MAX_LIVE_BYTES": "104857600",
            "HEADRACE_TARGET_STEP_TIME": "0",
            "HEADRACE_MAX_MEMORY_PERCENT": "0.25",
            "HEADRACE_IN_PROCESS": "true",
            "HEADRACE_LOG_LEVEL": "info",
            "OTEL_TRACES_SAMPLER_ARG": "0.1",
        }
        == told
    )


@NEEDS_HELM
def test_openai_s_api_is_served_by_the_service_s_names_and_let_in() -> None:
    things = rendered(VALUES["OpenAI's API"])
    told = variables(only(things, "Deployment")["spec"]["template"]["spec"])
    assert told["HEADRACE_OPENAI"] == "0.0.0.0:8080"
    service = only(things, "Service")["metadata"]["name"]
    hosts = told["HEADRACE_OPENAI_HOST"].split()
    assert hosts[0] == service
    assert hosts[2].startswith(f"{service}.")
    assert hosts[2].endswith(".svc")
    assert hosts[-1] == "llm.example"
    ports = {port["name"]: port for port in only(things, "Service")["spec"]["ports"]}
    assert ports["openai"]["port"] == 8080
    rule = only(things, "NetworkPolicy")["spec"]["ingress"][0]
    assert "openai" in {port["port"] for port in rule["ports"]}


@NEEDS_HELM
@pytest.mark.parametrize(("values", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_by_name(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        rendered(values)


def test_every_value_is_in_the_schema_and_in_a_test() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(values)
    assert set(values) == set(schema["properties"]) - {"global"}
    assert set(values) - {name for one in VALUES.values() for name in one} == {"replicas"}


@NEEDS_HELM
@pytest.mark.parametrize("values", [{}, VALUES["times"]])
def test_a_pod_may_end_as_long_as_its_drain_takes(values: dict[str, Any]) -> None:
    pods = PodSettings.read(only(rendered(values), "Deployment"))
    assert pods.grace_s >= pods.pre_stop_s + pods.drain_s + REST_S


def test_the_sidecar_is_one_and_may_end_as_long_as_its_drain_takes() -> None:
    thing = yaml.safe_load((ROOT / "deploy" / "sidecar.yaml").read_text(encoding="utf-8"))
    check_object(thing)
    pod = thing["spec"]
    assert own_container(pod)["restartPolicy"] == "Always"
    told = variables(pod)
    check_options(told)
    assert pod["terminationGracePeriodSeconds"] >= float(told["HEADRACE_DRAIN_TIMEOUT"]) + REST_S
    (application,) = pod["containers"]
    assert application["env"][0]["value"] == told["HEADRACE_LISTEN"]


@NEEDS_HELM
def test_a_policy_opens_what_the_pods_serve_but_not_their_health() -> None:
    things = rendered(VALUES["telemetry"])
    spec = only(things, "NetworkPolicy")["spec"]
    served = own_container(only(things, "Deployment")["spec"]["template"]["spec"])["ports"]
    opened = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
    assert opened == {port["name"] for port in served} - {"health"}
    assert {"protocol": "TCP", "port": 4317} in [
        p for rule in spec["egress"] for p in rule["ports"]
    ]


@NEEDS_HELM
def test_the_probes_ask_for_a_service_that_there_is() -> None:
    pod = only(rendered(), "Deployment")["spec"]["template"]["spec"]
    container = own_container(pod)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert variables(pod)["HEADRACE_HEALTH_LISTEN"].endswith(f":{ports['health']}")
    for name in ("startupProbe", "readinessProbe"):
        assert container[name]["grpc"]["port"] == ports["health"]
        assert container[name]["grpc"]["service"] in server.SERVICES
    assert container["livenessProbe"]["grpc"] == {"port": ports["health"], "service": ""}


@NEEDS_HELM
@pytest.mark.parametrize("age", [600, pytest.param(1, marks=pytest.mark.slow)])
def test_an_update_with_the_chart_s_settings_loses_nothing(age: int) -> None:
    values = {"maxConnectionAgeSeconds": age}
    pods = PodSettings.read(only(rendered(values), "Deployment"))
    assert pods.connection_age_s == age
    seen = Rollout(pods, seed=1).run()
    assert (seen["faults"], seen["workers_that_never_ended"], seen["killed"]) == ([], 0, 0)
    assert seen["outcomes"]["drained"] == pods.replicas
    assert seen["outcomes"]["session"] > 0


@NEEDS_HELM
def test_an_update_without_time_to_drain_loses_requests() -> None:
    pods = PodSettings.read(only(rendered({"drainSeconds": 0}), "Deployment"))
    assert Rollout(replace(pods, pre_stop_s=0), seed=1).run()["faults"] != []
