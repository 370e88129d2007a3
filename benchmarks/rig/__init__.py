"""What all measurements share, each thing once.

- `serving` starts a server, or any other process, waits for it, reads its CPU time and memory, and
  ends it.
- `load` sends requests to it, as `headrace bench` does, and reads its statistics.
- `stepping` loads an engine that is stepped in this process.
- `bench` lets systems take turns on one model, within a limit of time.
- `gateways` starts smg, and asks doors of OpenAI's API for chats.
- `measurement` turns options, a function that measures and a table into a command and a record.
"""
