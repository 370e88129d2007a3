"""Part `bytes`: whatever reads what others send, given bytes that nobody would send.

    target ──seeds, mutate──▶ input ──▶ test: it is taken, or refused with an error for its sender

Each target runs in a process of its own (`fuzz`), under Atheris where that is installed (the extra
`fuzz`), which keeps inputs that reach new code; else by chance alone. The inputs know the structure
of what they are: messages of the contract with fields changed, texts made of the marks that matter.
"""
