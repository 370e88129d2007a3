"""Outputs of a given form: grammars compiled by llguidance, and what follows an output through one.

    GrammarParams ─▶ source (checked) ─▶ GrammarCompiler (own threads, cache) ─▶ a matcher a choice

llguidance is imported by this package alone, and this package by the wiring alone.
"""

from engine.structured.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
