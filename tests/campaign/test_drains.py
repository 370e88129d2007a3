"""The row of drains says what did not arrive; `tests/service/test_shutdown.py` drains."""

from __future__ import annotations

from tests.campaign.drains import Outcome, row


def test_a_row_counts_what_did_not_arrive() -> None:
    broken = ["session-over-tcp: UNAVAILABLE", "exit code 1"]
    found = row([Outcome([], 0, 0.1), Outcome(broken, 1, 0.3), Outcome(broken[:1], 0, 0.2)])
    assert (found.count, found.worst) == (3, "0.3 s from the last answer to the exit")
    assert found.wrong == ["2 × session-over-tcp: UNAVAILABLE", "1 × exit code 1"]
