"""Logging that never waits for the reader of the log, and never fails with it.

    logging ─▶ handler ─┐
    sys.stderr ─────────┼─▶ LogQueue (drops) ─▶ a thread of its own ─▶ the file
    fd 2 ─▶ LineReader ─┘

`queue` has the queue and its thread, `lines` splits a stream into lines, and `records` encodes log
records for the way from the engine's process to the server's.
"""
