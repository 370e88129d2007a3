"""Checkpoints whose weights are quantised already: which there are, and how they are read.

    quantization_config, heads of the files ─▶ registry ─▶ a StoredFormat ─▶ StoredWeights, checked
    StoredWeights ─▶ StoredLinear: holds a layer's tensors as the file has them, and computes the
                     formula in torch ─▶ the model that the load gate takes for the right one
                  ─▶ Codes, some outputs at a time ─▶ packed (`engine.models.formats.grouped`)

A format is one module here. Nothing outside of it knows how its tensors lie in a file.
"""
