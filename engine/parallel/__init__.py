"""One model on several devices, a process for each (torchrun).

The leader has the core and sends each step to the followers; every rank computes its heads and
columns of the same model. `engine.loading.sharding` checks that the model's plan splits it rightly.
This room is handed what is loaded, and does not know how.
"""
