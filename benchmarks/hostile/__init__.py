"""Inputs that nobody should send: what they are, how they are sent, and how it is judged what a
neighbour feels of them. The campaign's part `hostile` (`benchmarks.trust.hostile`) tries them.

    inputs      what is sent, as data where it is one message, in groups of a server each
    sending     how: plain gRPC with messages as bytes; `http2` for what no library sends
    attacker    the process that sends
    server      what is attacked
    judging     what a neighbour may feel of it
"""
