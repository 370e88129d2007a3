"""Runs the engine in its own process, with the same interface over a private socket."""
