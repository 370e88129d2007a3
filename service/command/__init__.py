"""The command `headrace-server`: its verbs, flags and config files, and the server as a process
with signals and exit codes.

    entry ─▶ cli ─▶ serve: process ─▶ service.server
                 └▶ plan, pull, models, config, token

Environment variables of the service are read here alone.
"""
