"""The server's output: start-up and shutdown messages, log records, and what other code writes to
stderr. All of it is written as lines to the stderr that the process started with. Nothing blocks if
the reader of stderr is slow.

    say ────────────────────────────▶┐
    logging ─▶ limits ─▶ a format ───┼─▶ engine.logs' queue ─▶ its thread ─▶ stderr
    fd 2 (native code) ─▶ a pipe ────┘   (drops)

`output` connects these, `limits` restricts how much untrusted clients can cause to be logged, and
`form` formats it.
"""
