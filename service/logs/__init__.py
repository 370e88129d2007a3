"""The server's output: lines of start-up and shutdown, log records, and what other code writes to
stderr. All of it ends up as lines on the stderr that the process was started with; nothing waits
for the reader.

    say ────────────────────────────▶┐
    logging ─▶ limits ─▶ a format ───┼─▶ engine.logs' queue ─▶ its thread ─▶ stderr
    fd 2 (native code) ─▶ a pipe ────┘   (drops)

`output` wires it, `limits` restricts how much untrusted clients can cause to be logged, `form`
formats it.
"""
