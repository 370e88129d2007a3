"""Whether NVIDIA's driver on this host is new enough for the CUDA version that torch was built for.

With an older driver, torch reports that there is no device, and a server would run on the CPU.
"""

from __future__ import annotations

import re
from pathlib import Path

_VERSION = Path("/proc/driver/nvidia/version")
_DEVICE = Path("/dev/nvidiactl")
"""In a container that was given no GPU, the host's driver can be read, but this file is missing."""
_OLDEST = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch for each major version of CUDA. Source: the table of minor version
compatibility in the CUDA compatibility guide.
"""


def why_unusable(cuda: str | None) -> str | None:
    """Why the driver cannot be used, and what to do. None if it can be, or if there is no GPU.

    Args:
        cuda: the version of CUDA that torch was built with, such as "13.0"; None for a CPU build.
    """
    if cuda is None or not _DEVICE.exists():
        return None
    try:
        found = re.search(r"\b(\d+)\.\d+(?:\.\d+)?\b", _VERSION.read_text(encoding="utf-8"))
    except OSError:
        return None
    oldest = _OLDEST.get(int(cuda.partition(".")[0]), 0)
    if found is None or int(found.group(1)) >= oldest:
        return None
    return (
        f"the NVIDIA driver here is {found.group(0)}, but torch was built for CUDA {cuda}, which "
        f"needs driver {oldest} or newer: update the driver, install a torch that was built for an "
        "older CUDA"
    )
