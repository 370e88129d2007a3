"""Distinct types for integers and strings that must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The name of a live request, unique in the engine. The service adds a prefix so that different
callers' names cannot collide.
"""

RequestKey = NewType("RequestKey", int)
"""The engine's identifier for one choice of a request, never reused. A request with n choices has n
records in the engine, each with its own key.
"""

CallerKey = NewType("CallerKey", str)
"""Who is charged for a request's service. Keys are only compared for equality."""

NO_CALLER = CallerKey("")
"""The key used when no caller was named. All such requests count as one caller's."""

TokenId = NewType("TokenId", int)
"""An index into the model's vocabulary: 0 ≤ id < vocab_size."""

BlockId = NewType("BlockId", int)
"""A KV cache block of one layer group. Block 0 is the null block of every group, to which padding
is written.
"""

GroupId = NewType("GroupId", int)
"""A layer group: layers that store their KV in the same way (kind, window) and share block tables.
"""
