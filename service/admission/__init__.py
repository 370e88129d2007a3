"""The limits on what requests may take: places, tokens, bytes and time in the text threads. They
apply in total, per identity, and to each caller's share (`engine.fairness`).

This package counts, refuses, and advises when to try again. It deals with accounts and amounts, and
does not look at what a request asks for.
"""
