"""Runs the engine behind EngineClient, either on a thread of this process, or in a separate process
over a private socket.

Frozen dataclasses cross the socket, and are checked against their types on arrival. Nothing
received is executed. The front end's side does not import torch.
"""
