"""What a request may take, before it is taken: places, tokens, bytes and the text threads' time, in
all, by identity and by each caller's share (`engine.fairness`).

It counts, and refuses with advice when to try again. It knows accounts and amounts, not what a
request asks for.
"""
