"""Names for integers and strings that look alike but must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""The name of a live request, unique in the engine. The service adds a prefix, so that names of
different callers cannot collide.
"""

RequestKey = NewType("RequestKey", int)
"""The engine's own name for one choice of a request, never reused. A request with n choices has n
records in the engine, each with a key.
"""

CallerKey = NewType("CallerKey", str)
"""Who is charged for a request's service. Keys are only compared for equality."""

NO_CALLER = CallerKey("")
"""No caller was named; all such requests count as one caller's."""

TokenId = NewType("TokenId", int)
"""An index into the model's vocabulary: 0 ≤ id < vocab_size."""

BlockId = NewType("BlockId", int)
"""A KV cache block of one layer group. 0 is the null block of every group, to which padding is
written.
"""

GroupId = NewType("GroupId", int)
"""A layer group: layers that store their KV in the same way (kind, window) and share block tables.
"""
