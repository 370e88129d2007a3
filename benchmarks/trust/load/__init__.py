"""Part `load`: what stays the same while everything else goes on.

Two looks at the same promise. `traced` counts Python's own bytes for each request, on the scripted
engine: a kilobyte that stays shows in seconds. `mixed` lets a real server run under open-loop load
of all kinds, and looks at the memory, threads and files of its processes from outside.
"""
