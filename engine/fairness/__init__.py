"""Who may have how much of a limit, and when who was refused may try again.

    ask ─▶ Shares ─┬─▶ granted
                   └─▶ refused: a retry ticket, and advice by the rate of releases

It knows callers by their keys, and amounts; what is counted (requests, tokens, bytes) only its
users know. The service's limits use it too. No torch.
"""
