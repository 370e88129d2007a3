"""A container without a container runtime, for trying an image. Its root file system is read-only.
The command runs in separate mount, process and network namespaces, as an unprivileged user without
capabilities, with its own /tmp. Only root can create it.

Unlike a real container, it has no cgroup, no user namespace and no seccomp profile.
"""

from __future__ import annotations

import queue
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

WAIT_S = 120.0
"""The limit of each wait, in seconds."""

_SETUP = """
set -e
ip link set lo up
mount --make-rprivate /
mount --bind {root} {root}
mount -o remount,bind,ro {root}
mount -t proc proc {root}/proc
mount -t tmpfs tmpfs {root}/tmp -o mode=1777
mount -t tmpfs tmpfs {root}/run/headrace -o uid={user},gid={user}
mount -t tmpfs tmpfs {root}/dev -o mode=755
mkdir {root}/dev/shm
mount -t tmpfs tmpfs {root}/dev/shm -o mode=1777
for device in null zero full random urandom; do
    touch {root}/dev/$device; mount --bind /dev/$device {root}/dev/$device
done
{mounts}
exec env -i {env} setpriv --no-new-privs chroot --userspec={user}:{user} {root} {command}
"""


class Box:
    """The image's command, running.

    Args:
        root: the image's file system, mounted.
        config: the image's configuration: Env, Entrypoint, Cmd.
        user: the id of the user and group.
        env: variables that override or extend the image's.
        command: replaces the image's Cmd.
        mounts: folders of this machine, mounted read-only, by their path in the box, which must
            exist.
    """

    def __init__(
        self,
        root: Path,
        config: dict[str, Any],
        *,
        user: int,
        env: dict[str, str] | None = None,
        command: list[str] | None = None,
        mounts: dict[str, Path] | None = None,
    ) -> None:
        self._root = root
        self._user = user
        variables = dict(variable.split("=", 1) for variable in config["Env"]) | (env or {})
        self._env = shlex.join(f"{name}={value}" for name, value in variables.items())
        run = [*config["Entrypoint"], *(config["Cmd"] if command is None else command)]
        bind = "".join(
            f"mount --bind {shlex.quote(str(source))} {root}{place}\n"
            f"mount -o remount,bind,ro {root}{place}\n"
            for place, source in (mounts or {}).items()
        )
        script = _SETUP.format(
            root=root, user=user, env=self._env, command=shlex.join(run), mounts=bind
        )
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c", script],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Box:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)

    def read_until(self, mark: str) -> None:
        """Wait for a line of the container's log.

        Raises:
            RuntimeError: the container ended first.
        """
        while True:
            line = self._lines.get(timeout=WAIT_S)
            self.said.append(line)
            if mark in line:
                return
            if not line:
                raise RuntimeError(f"it ended without saying {mark!r}:\n{''.join(self.said)}")

    def read_rest(self) -> None:
        """Wait for the end of the container's log."""
        while line := self._lines.get(timeout=WAIT_S):
            self.said.append(line)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start another command inside as the same user, like `docker exec`."""
        inside = f"exec env -i {self._env} chroot --userspec={self._user}:{self._user}"
        return subprocess.Popen(
            [
                "nsenter", "--target", f"{self.init()}", "--mount", "--pid", "--net",
                "sh", "-c", f"{inside} {self._root} {shlex.join(command)}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def run(self, *command: str) -> tuple[int, str]:
        """Run another command inside and return its exit code and output."""
        process = self.start(*command)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, said

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process, like `docker stop`."""
        subprocess.run(["kill", f"-{number.value}", f"{self.init()}"], check=True)

    def wait(self) -> int:
        """Wait for the container to end and return its exit code."""
        return self._process.wait(WAIT_S)

    def init(self) -> int:
        """The process id of the first process, as seen from outside."""
        own = self._process.pid
        return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[0])

    def resident_bytes(self) -> int:
        """Return the resident memory of the first process and all of its descendants."""
        first = self.init()
        processes = [first]
        for process in processes:
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            processes += map(int, children)
        total = 0
        for process in processes:
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.put(line)
        self._lines.put("")
