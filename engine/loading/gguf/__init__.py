"""GGUF files: one file with a model's metadata, tokenizer and weights, in blocks of 4 to 8 bits.

`container` reads the file's head and maps its tensors. `blocks` turns their rows into codes, and
`naming` says which weight of transformers' model each of them is. Nothing in a file is run.
"""
