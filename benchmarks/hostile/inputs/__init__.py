"""All hostile inputs in the order in which they run, with one server for each group."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.hostile.inputs.chats import CHATS
from benchmarks.hostile.inputs.control import CONTROL_GROUP
from benchmarks.hostile.inputs.kinds import Group, Input
from benchmarks.hostile.inputs.messages import MESSAGES
from benchmarks.hostile.inputs.options import OPTIONS
from benchmarks.hostile.inputs.reading import READING
from benchmarks.hostile.inputs.requests import (
    REQUESTS,
    WAITING,
    WAITING_PROMPTS,
)
from benchmarks.hostile.inputs.sessions import SESSIONS
from benchmarks.hostile.inputs.strangers import (
    BODIES,
    CONNECTIONS,
    STREAMS,
    TLS,
)
from benchmarks.hostile.inputs.structured import STRUCTURED
from benchmarks.hostile.inputs.tags import TAGS
from benchmarks.hostile.inputs.texts import TEXTS

GROUPS = (
    MESSAGES,
    CHATS,
    TEXTS,
    replace(STRUCTURED, inputs=(*STRUCTURED.inputs, *TAGS)),
    OPTIONS,
    SESSIONS,
    READING,
    REQUESTS,
    CONTROL_GROUP,
    BODIES,
    CONNECTIONS,
    STREAMS,
    TLS,
    WAITING,
    WAITING_PROMPTS,
)
"""All groups. Inputs that mainly test memory use are in small groups with a new server each."""
INPUTS: dict[str, Input] = {one.name: one for group in GROUPS for one in group.inputs}
__all__ = ["CHATS", "GROUPS", "INPUTS", "Group", "Input"]
