"""Logging that never waits for the reader of the log and never fails with it.

    logging ─▶ handler ─┐
    sys.stderr ─────────┼─▶ LogQueue (drops) ─▶ a separate thread ─▶ the file
    fd 2 ─▶ LineReader ─┘

`queue` contains the queue and its thread, and `lines` splits a stream into lines. `records` encodes
the log records that the engine's process sends to the server's process.
"""
