"""The cases of each format, a module each.

CASES       replies, and what they come to
TRUNCATED   a reply that is cut everywhere, with the TOOLS of the module
WRAPS       how a call with JSON arguments is written, where they are read as they are
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from service.replies import FORMATS

CORPORA: dict[str, Any] = {name: import_module(f"{__name__}.{name}") for name in FORMATS}
