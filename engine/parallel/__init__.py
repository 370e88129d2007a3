"""One model on several devices, with one process for each (torchrun).

The leader has the engine core and sends each step to the followers. Every rank computes its heads
and columns of the same model. `engine.loading.sharding` checks that the model's sharding plan is
correct. This package receives what is already loaded, and does not depend on loading.
"""
