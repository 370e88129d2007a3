"""How many requests there are in the front end, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryStats:
    """How much there is now.

    Attributes:
        live: requests that have not ended.
        streams: streams that are open.
        attached: requests on them, ended and unread ones too.
        kept, kept_bytes: ended requests whose results are kept, and about how many bytes.
    """

    live: int
    streams: int
    attached: int
    kept: int
    kept_bytes: int
