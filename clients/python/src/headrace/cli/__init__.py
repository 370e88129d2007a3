"""The `headrace` command: `generate`, `chat` and `batch` against a running server.

Exit codes: 0 done; 1 a request was refused or failed (or, in a batch, some were); 2 wrong usage;
3 the server cannot be reached or is not ready; 130 interrupted by Ctrl-C.
"""
