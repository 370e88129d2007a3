"""One file per measured system. Each is a process that loads the model once and runs turns.

Peers run in separate interpreters: `loop`, and whatever their files import from this package, need
only the standard library.
"""
