"""The load program of the Python client. It reads one request after the other. What arrives for the
others meanwhile is buffered, so no thread per request is needed.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import headrace


def turn(client: headrace.Client, sessions: int, requests: int, tokens: int) -> int:
    with ExitStack() as stack:
        opened = [stack.enter_context(client.session()) for _ in range(sessions)]
        handles = [
            session.submit("Once upon a time", max_tokens=tokens, ignore_eos=True, temperature=0)
            for session in opened
            for _ in range(requests)
        ]
        return sum(len(chunk.token_ids) for handle in handles for chunk in handle)


def main() -> None:
    sessions, requests, tokens = map(int, sys.argv[2:])
    with headrace.Client(sys.argv[1]) as client:
        for _ in sys.stdin:
            count = turn(client, sessions, requests, tokens)
            sys.stdout.write(json.dumps({"tokens": count}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
