"""What the engine's rooms hand one another, and what its users see of it: options, requests, their
results, statistics, errors, and the client that the service calls (`engine_client`).

Plain data, checked where it is made. It knows no other room, and imports neither torch nor
transformers; environment variables are read here alone (`environment`).
"""
