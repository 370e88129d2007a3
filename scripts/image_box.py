"""A container without a container runtime, for trying an image: its root file system read-only, in
mount, process and network namespaces of its own, as an unprivileged user without capabilities, with
a /tmp of its own. Only root can make it.

What it does not have of a real container: a cgroup of its own, a user namespace, a seccomp profile.
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
"""No single wait takes longer."""

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
        config: what the image says of itself: Env, Entrypoint, Cmd.
        user: the id of user and group.
        env: more variables, over the image's.
        command: instead of the image's Cmd.
        mounts: folders of this machine, read-only, by their place in the box, which must be there.
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
        """Waits for a line of its log.

        Raises:
            RuntimeError: it has ended before.
        """
        while True:
            line = self._lines.get(timeout=WAIT_S)
            self.said.append(line)
            if mark in line:
                return
            if not line:
                raise RuntimeError(f"it ended without saying {mark!r}:\n{''.join(self.said)}")

    def read_rest(self) -> None:
        """Waits for the end of its log."""
        while line := self._lines.get(timeout=WAIT_S):
            self.said.append(line)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Begins another command inside, as the same user: as `docker exec` does."""
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
        """Another command inside: its exit code and output."""
        process = self.start(*command)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, said

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its first process, as `docker stop` does."""
        subprocess.run(["kill", f"-{number.value}", f"{self.init()}"], check=True)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(WAIT_S)

    def init(self) -> int:
        """The process id of its first process, outside."""
        own = self._process.pid
        return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[0])

    def resident_bytes(self) -> int:
        """The memory of its first process and of all that come from it."""
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
