"""What is told of a request."""

import pytest

from reprise.api.records import Record, log_line
from reprise.core.record import Outcome, Reason


def record(*outcomes: Outcome, ended: str = "stop") -> Record:
    return Record(id="r1", api="chat", model="m", created=0.0, namespace="", ended=ended, outcomes=outcomes)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (record(ended="cancelled"), "r1 chat: cancelled before it began"),
        (
            record(Outcome(prompt=90, reused=60, prefilled=30, generated=7, reason=Reason.NEW_TOKENS, ttft_s=0.25)),
            "r1 chat: stop, prompt 90, reused 60, prefilled 30 (new tokens), generated 7, first token 0.250 s",
        ),
        (
            record(Outcome(prompt=90, reused=60, loaded=40, prefilled=30, reason=Reason.NEW_TOKENS)),
            "r1 chat: stop, prompt 90, reused 60 (40 of them from disk), prefilled 30 (new tokens), generated 0, "
            "first token -",
        ),
    ],
)
def test_a_line_of_the_log_says_what_was_reused_and_from_where(told: Record, line: str) -> None:
    assert log_line(told) == line
