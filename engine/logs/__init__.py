"""How a process says something without ever waiting for whoever reads it, or failing with them.

    logging ─▶ handler ─┐
    sys.stderr ─────────┼─▶ LogQueue (drops) ─▶ a thread of its own ─▶ the file
    fd 2 ─▶ LineReader ─┘

`queue` holds the queue and its thread, `lines` what makes lines of a stream, `records` how a log
record travels from the engine's process to the server's.
"""
