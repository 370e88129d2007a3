"""Several servers behind one client: what a fleet loses while its servers come and go, where
requests with a common prefix go, and the combined throughput of unequal servers. See `__main__`.
"""
