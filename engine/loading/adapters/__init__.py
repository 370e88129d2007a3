"""Adapters from directories that peft has written: read, checked, and made ready for steps.

    directory ─▶ read_adapter ─▶ LoraConfig, tensors ─▶ targets ─▶ AdapterWeights, digest ─▶ Adapter

Nothing of a directory is run, and what is not computed exactly is refused by name.
"""
