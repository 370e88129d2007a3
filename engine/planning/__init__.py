"""What a model will need and how fast it will be, computed before its weights are loaded.

It reads no weights, and serves nobody: it is what `headrace-server plan` and the manager's owner
ask.
"""
