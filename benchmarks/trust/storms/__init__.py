"""Part `storms`: many at once, and what an operator changes meanwhile.

Each storm is sent to a server of its own at default settings, with a witness beside it, whose
tokens and health checks are judged; its waits are told.
"""
