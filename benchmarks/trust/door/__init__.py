"""Part `door`: attacks on `headrace openai`, beside a witness of the server and an HTTP caller.

part
  ├── server     headrace-server serve, with a file of callers
  ├── door       headrace openai, in front of it
  ├── witness    benchmarks.witness: a caller of the server itself
  ├── neighbour  a caller of the door, by streams
  └── attacker   benchmarks.hostile.door, a process for each attack
"""
