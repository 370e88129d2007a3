"""Structured output: grammars compiled by llguidance, and matchers that follow an output through
them.

    GrammarParams ─▶ source (checked) ─▶ GrammarCompiler (own threads, cache) ─▶ matchers

Only this package imports llguidance, and only `engine.assembly` imports this package.
"""

from engine.structured.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
