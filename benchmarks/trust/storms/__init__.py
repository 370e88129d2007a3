"""Part `storms`: large numbers of concurrent calls, and changes that an operator makes meanwhile.

Each storm runs against a new server with default settings. The tokens and health checks of a
witness are judged; its waits are only reported.
"""
