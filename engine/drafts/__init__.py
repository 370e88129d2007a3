"""Guesses at the tokens that follow in a request's output: where they come from, and how many of
them a step computes. They change no token, only how many steps an output takes.

A request's tokens go in, and `Request.drafts` comes out, before each step. A source of guesses is a
file here, behind `DraftSource`. The room knows neither tensors nor the scheduler, which asks it.
"""
