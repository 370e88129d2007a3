"""The command `headrace-server`: its subcommands, flags and config files, and the server as a
process with signals and exit codes.

    entry ─▶ cli ─▶ serve: process ─▶ service.server
                 └▶ plan, pull, models, config, token

The service's environment variables are read only here.
"""
