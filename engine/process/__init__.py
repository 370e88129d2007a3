"""Runs the engine behind EngineClient: on a thread of this process, or in one of its own, over a
private socket.

Frozen dataclasses cross the socket, and are checked against their types on arrival; nothing that
arrives is executed. The side of the front end does not import torch.
"""
