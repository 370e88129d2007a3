"""Hostile inputs: what is sent, how it is sent, and how the effect on a well-behaved caller is
judged.

The campaign's part `hostile` (`benchmarks.trust.hostile`) runs them.

    inputs      the inputs, in groups that share a server; single messages are given as data
    sending     sends messages as bytes over plain gRPC; `http2` sends what no library sends
    attacker    the process that sends
    server      the server under attack
    judging     limits on what a well-behaved caller may notice
"""
