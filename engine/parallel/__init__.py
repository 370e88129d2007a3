"""One model on several devices, a process for each (torchrun).

The leader has the core and sends each step to the followers; every rank computes its heads and
columns of the same model. `sharding` checks at load that the model's own plan splits it correctly.
"""
