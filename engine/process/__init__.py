"""The engine in a process of its own: the same seam, over a private socket."""
