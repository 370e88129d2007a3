"""A request's results as plain data: what was asked for (`submission`), what comes of it
(`events`), and how much of it may wait to be read (`flow`). `service.delivery` acts by it.
"""
