"""All hostile inputs in the order in which they run, with one server for each group."""

from __future__ import annotations

from tests.campaign.hostile.inputs.chats import CHATS
from tests.campaign.hostile.inputs.control import CONTROL_GROUP
from tests.campaign.hostile.inputs.derived import FIELDS, of
from tests.campaign.hostile.inputs.kinds import Group, Input
from tests.campaign.hostile.inputs.messages import MESSAGES
from tests.campaign.hostile.inputs.options import OPTIONS
from tests.campaign.hostile.inputs.reading import READING
from tests.campaign.hostile.inputs.requests import (
    REQUESTS,
    WAITING,
    WAITING_PROMPTS,
)
from tests.campaign.hostile.inputs.sessions import SESSIONS
from tests.campaign.hostile.inputs.strangers import (
    BODIES,
    CONNECTIONS,
    STREAMS,
    TLS,
)
from tests.campaign.hostile.inputs.tags import STRUCTURED
from tests.campaign.hostile.inputs.texts import TEXTS

CHOSEN = (
    MESSAGES,
    CHATS,
    TEXTS,
    STRUCTURED,
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
_taken = {case.field for group in CHOSEN for one in group.inputs for case in one.cases}
OTHERS = Group("other fields")
OTHERS.tries(
    "other-fields",
    "hostile values of all scalar fields that no other input takes",
    *of(*(FIELDS.keys() - _taken)),
)
GROUPS = (*CHOSEN, OTHERS)
"""All groups. Inputs that mainly test memory use are in small groups with a new server each."""
INPUTS: dict[str, Input] = {one.name: one for group in GROUPS for one in group.inputs}
__all__ = ["CHATS", "GROUPS", "INPUTS", "Group", "Input"]
