"""Decides how much of a limit each caller may use, and when a refused caller may try again.

    ask ─▶ Shares ─┬─▶ granted
                   └─▶ refused: a retry ticket, and advice by the rate of releases

This package handles only caller keys and amounts. Its users decide what is counted: requests,
tokens or bytes. The service's limits use it too. It does not use torch.
"""
