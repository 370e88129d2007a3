"""`headrace bench`: puts load on a server and measures it.

1. `command` checks the options and connects.
2. `prompts` makes the requests: random token ids, or the lines of a file.
3. `load` sends them, in an open or a closed loop, over one or several sessions.
4. `measures` collects the measurements, in bounded memory.
5. `report` presents them as a table and as JSON, `plot` as a picture.
"""
