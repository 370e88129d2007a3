"""One file a system that is measured. Each is a process that loads the model once and runs turns.

Peers run in interpreters of their own: `loop` and what is imported from this package by their
files need nothing but the standard library.
"""
