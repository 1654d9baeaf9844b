"""The trained head of the demo's model guesses what the model says, and costs no token of prefill."""

import pytest

from bench.draft_replay import COSTS, ReplayTurn
from bench.heads import HEAD, STEPS, GuessedSide, HeadCounts, chats, hold
from reprise.drafts.history import TokenHistory


def held(turns: list[ReplayTurn], **settings: str) -> HeadCounts:
    side = GuessedSide(COSTS["memory"], STEPS["head"], **settings)
    try:
        return hold(side, turns)
    finally:
        side.close()


@pytest.fixture(scope="module")
def turns() -> list[ReplayTurn]:
    return chats(1, 6)


def test_most_of_what_the_model_says_is_guessed(turns: list[ReplayTurn], monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is looked up: the head is asked for every draft.
    monkeypatch.setattr(TokenHistory, "find", lambda history, tail, num: None)
    plain, guessed = held(turns, mtp="off"), held(turns, mtp=str(HEAD))
    assert guessed.answers == plain.answers
    assert plain.passes_per_token == 1
    assert guessed.first_share >= 0.9
    assert guessed.passes_per_token <= 0.6
    # Reuse is as without a head: what is new is computed once, and no prompt is read to the head again.
    assert guessed.num_computed == plain.num_computed


def test_text_that_is_known_goes_before_what_is_guessed(turns: list[ReplayTurn]) -> None:
    looked_up, both = held(turns, mtp="off"), held(turns, mtp=str(HEAD))
    assert both.answers == looked_up.answers
    assert both.speed >= 1.5 * looked_up.speed
    assert both.num_computed == looked_up.num_computed
