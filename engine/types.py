"""Names for integers and strings that look alike but must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The engine-wide name of a live request. The service prefixes it so that two callers' names cannot
collide.
"""

RequestKey = NewType("RequestKey", int)
"""The engine's own name of one choice of a request: unique for the life of an engine, never reused.
A request of n choices is n records in the engine, each with a key.
"""

CallerKey = NewType("CallerKey", str)
"""For whom a request's service is counted. Nothing but equality is looked at."""

NO_CALLER = CallerKey("")
"""Nobody was named; all such requests are one caller's."""

TokenId = NewType("TokenId", int)
"""An index into the model's vocabulary: 0 ≤ id < vocab_size."""

BlockId = NewType("BlockId", int)
"""A KV cache block of one layer group. 0 is the null block of every group: it takes padding writes.
"""

GroupId = NewType("GroupId", int)
"""A layer group: layers that keep their KV in the same way (kind, window) and share block tables.
"""
