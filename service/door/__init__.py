"""The path from a socket to a servicer: addresses and TLS, the caller's identity, reading a call's
messages, and ending the call.

    connection ─▶ listening, tls ─▶ Recovery ─▶ Entrance: caller, phase, message ─▶ servicer

This package does not look at what a message asks for. It answers health and reflection calls, and
starts and supervises the HTTP door's process. It depends on neither the engine nor its requests.
"""
