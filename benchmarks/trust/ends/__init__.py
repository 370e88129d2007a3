"""Part `ends`: how requests end, whatever fails meanwhile.

The service is the real one, over sockets; so are the engine's loop, core, scheduler and KV cache.
Only the model is a script (`tests.engine.fake_runner`), whose tokens are worked out by hand and
which checks every batch and block that it is given. A `Gate` holds each step back, so that a
request stands still in the state that is wanted; the engine may be in this process or in one of its
own.
"""
