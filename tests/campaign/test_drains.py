"""The record of drains says what did not arrive; `tests/service/test_shutdown.py` drains."""

from __future__ import annotations

from tests.campaign.drains import Outcome, summary


def test_the_record_counts_what_did_not_arrive() -> None:
    broken = ["session-over-tcp: UNAVAILABLE", "exit code 1"]
    outcomes = [Outcome([], 0, 0.1), Outcome(broken, 1, 0.3), Outcome(broken[:1], 0, 0.2)]
    found = summary(outcomes, 12.4)
    assert (found["drains"], found["drains_with_failures"], found["seconds"]) == (3, 2, 12)
    assert found["failures"] == {"session-over-tcp: UNAVAILABLE": 2, "exit code 1": 1}
    times = found["seconds_from_the_cancel_to_the_exit"]
    assert (times["median"], times["most"]) == (0.2, 0.3)
    assert len(found["clients_of_each"]) == 8
