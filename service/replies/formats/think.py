"""Reasoning alone: `<think>…</think>`, then the answer. The template may already have opened the
reasoning.
"""

from __future__ import annotations

from service.replies.format import marked

FORMAT = marked("think", {}, templates=(("<think>",), ("</think>",)))
