"""The data types shared by the engine's packages and its users: options, requests, results,
statistics, errors, and the client that the service calls (`engine_client`).

These types are plain data, validated on construction. This package imports no other engine package,
nor torch or transformers. It is the only one that reads environment variables (`environment`).
"""
