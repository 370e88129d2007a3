"""From a socket to a servicer: addresses and TLS, who calls, what is read of a call, how it ends.

    connection ─▶ listening, tls ─▶ Recovery ─▶ Entrance: caller, phase, message ─▶ servicer

What a message asks for is not looked at here. Health and reflection are answered here; the HTTP
door's process is started and supervised here. It knows neither the engine nor its requests.
"""
