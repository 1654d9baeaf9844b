"""Shepherd Model Gateway before two real servers: chats outlive a replica that is killed, and move with their cache."""

import pytest

from reprise.demo.cluster import hold_all
from reprise.disk.read_ahead import MIN_TOKENS
from tests.agents.packages import python_with

pytestmark = pytest.mark.agents

VERSION = "1.13.0"


def test_nobody_loses_more_than_the_answer_under_way() -> None:
    smg = str(python_with("smg", [f"smg=={VERSION}"]).parent / "smg")
    alone, shared, apart = hold_all(smg, num_chats=4, num_turns=24)
    assert shared.num_right == apart.num_right == alone.num_right >= 90 and shared.num_lost <= 4
    # Fewer tokens than that are computed as soon as they are read.
    assert shared.num_computed_then < alone.num_computed_then + 4 * MIN_TOKENS
