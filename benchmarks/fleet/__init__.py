"""Several servers behind one client: what a fleet loses while its servers come and go, where
requests with a common prefix go, and what unequal servers deliver together. See `__main__`.
"""
