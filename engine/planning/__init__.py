"""Estimates what memory a model will need and how fast it will be, before its weights are loaded.

It reads no weights and serves no requests. `headrace-server plan` and the manager use it.
"""
