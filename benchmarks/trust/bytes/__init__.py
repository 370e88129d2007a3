"""Part `bytes`: fuzzing of everything that parses input from others.

    target ──seeds, mutate──▶ input ──▶ test: accepted, or refused with an error for the sender

Each target runs in a separate process (`fuzz`). If Atheris is installed (the extra `fuzz`), it
keeps inputs that reach new code; otherwise inputs are random. Mutations know the structure of the
input: they change fields of messages and build texts from significant characters.
"""
