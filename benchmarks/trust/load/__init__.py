"""Part `load`: resource use stays constant under load.

Two measurements test the same promise. `traced` counts the Python memory that each request leaves
behind, on the scripted engine; it detects a leak of a kilobyte per request within seconds. `mixed`
runs a real server under open-loop load of all kinds and measures the memory, threads and files of
its processes from outside.
"""
