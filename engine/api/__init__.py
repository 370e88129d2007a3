"""The engine in the user's own process, with the names of transformers' continuous batching.

load, from_model ─▶ LoadedModel ─▶ generate_batch, or a manager: add_request, get_result, handlers

A manager is a loop (`engine.core.loop`) with a router of results; the service takes neither.
"""
