"""The Python API: runs the engine in the user's process, with the names of transformers' continuous
batching.

load, from_model ─▶ LoadedModel ─▶ generate_batch, or a manager: add_request, get_result, handlers

A manager combines a loop (`engine.core.loop`) with a router of results. The service does not use
this package's managers or routers.
"""
