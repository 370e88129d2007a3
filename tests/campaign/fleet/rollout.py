"""A rolling update of a Deployment under load, with the settings of its manifest.

This process plays the role of the cluster. A new server starts. Once it is ready, it is added to
the name, and an old one is removed. The old one continues for as long as preStop sleeps, then gets
SIGTERM, and is killed if it has not ended within the grace period. This repeats until all servers
are new.
"""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from tests.campaign.fleet.campaign import Campaign
from tests.service.real_server import ServerProcess


@dataclass(frozen=True)
class PodSettings:
    """A Deployment's settings for starting and stopping pods; all times in seconds."""

    replicas: int
    pre_stop_s: float
    grace_s: float
    drain_s: float
    connection_age_s: float

    @staticmethod
    def read(deployment: dict[str, Any]) -> PodSettings:
        """Return the settings of a manifest. Raises ValueError if it lets a pod stop before another
        one is ready.
        """
        spec = deployment["spec"]
        update = spec["strategy"]["rollingUpdate"]
        if update != {"maxUnavailable": 0, "maxSurge": 1}:
            raise ValueError(f"pods are not replaced one by one: {update}")
        pod = spec["template"]["spec"]
        container = pod["containers"][0]
        env = {one["name"]: one.get("value") for one in container["env"]}
        return PodSettings(
            replicas=spec["replicas"],
            pre_stop_s=container["lifecycle"]["preStop"]["sleep"]["seconds"],
            grace_s=pod["terminationGracePeriodSeconds"],
            drain_s=float(env["HEADRACE_DRAIN_TIMEOUT"]),
            connection_age_s=float(env["HEADRACE_MAX_CONNECTION_AGE"]),
        )


class Rollout(Campaign):
    """One update of all servers. In addition to the outcomes, its result has `killed`: how many
    servers did not end within their grace period.
    """

    strangers = 0.0  # a client that comes when a server has left the name cannot ask it

    def __init__(self, pods: PodSettings, *, seed: int) -> None:
        super().__init__(
            seconds=0, seed=seed, drain=pods.drain_s, connection_age=pods.connection_age_s
        )
        self.servers = pods.replicas
        self._pods = pods

    def _happen(self, begun: float) -> dict[str, Any]:
        killed = 0
        for old in list(self._listed):
            self._add(self._started())
            with self._lock:
                self._listed.remove(old)
            with self._departing():
                killed += not self._ended(old)
        return {"seconds": round(time.monotonic() - begun, 1), "killed": killed}

    def _ended(self, old: ServerProcess) -> bool:
        time.sleep(self._pods.pre_stop_s)
        old.signal(signal.SIGTERM)
        try:
            code = old.ended(self._pods.grace_s - self._pods.pre_stop_s)
        except subprocess.TimeoutExpired:
            old.close()
            return False
        self._count("drained" if code == 0 else f"drained with exit code {code}")
        return True
