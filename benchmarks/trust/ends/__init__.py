"""Part `ends`: how requests end, whatever fails meanwhile.

The service is real and uses sockets; the engine's loop, core, scheduler and KV cache are real too.
Only the model is scripted (`tests.engine.fake_runner`): its tokens are computed by hand, and it
checks every batch and block. A `Gate` can hold back each step, so that a request stays in the
desired state. The engine runs in this process or in a separate one.
"""
