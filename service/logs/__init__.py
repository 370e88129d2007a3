"""What the server says: lines of start-up and shutdown, log records, what others write to its
stderr. All of it ends as lines on the stderr that the process was started with, and nothing that is
said waits for whoever reads them.

    say ────────────────────────────▶┐
    logging ─▶ limits ─▶ a format ───┼─▶ engine.logs' queue ─▶ its thread ─▶ stderr
    fd 2 (native code) ─▶ a pipe ────┘   (drops)

`output` wires it, `limits` bounds what strangers can make it say, `form` makes text of it.
"""
