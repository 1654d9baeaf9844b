"""Pins stay under pressure, end with their time, follow a conversation, and give way only when asked to."""

import pytest

from reprise.cache.pins import PinnedTotal
from reprise.core.kinds import Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import as_tokens
from tests.cache.hash_model import SNAPSHOT_NBYTES
from tests.cache.strategies import EXAMPLES
from tests.cache.trial import CacheTrial

CHAT = tuple(range(1, 41))


def by_name(layout: Layout) -> str:
    return str(layout)


def _trial(layout: Layout) -> CacheTrial:
    trial = CacheTrial(layout)
    for at in (10, 20, 30, 40):
        trial.commit(CHAT[:at])
    return trial


def _evict_all(trial: CacheTrial) -> int:
    """Evict whatever may go; gives how far the chat still reaches."""
    while trial.cache.evict_one():
        trial.cache.check()
    return trial.request(CHAT, is_held=False, limit=len(CHAT))


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_position_that_is_stored_can_be_pinned_and_let_go(layout: Layout) -> None:
    trial = _trial(layout)
    assert trial.cache.pin(as_tokens(CHAT[:20]), namespace="", until=5.0)
    trial.cache.check()
    assert _evict_all(trial) == 20
    held = trial.cache.nbytes
    assert trial.cache.pins.total() == PinnedTotal(num=1, nbytes=held, until=5.0)
    (mark,) = trial.cache.pins
    assert tuple(trial.cache.prefix_of(mark)) == CHAT[:20]
    assert trial.cache.pins.unpin(mark)
    assert not trial.cache.pins.unpin(mark)
    trial.cache.check()
    assert _evict_all(trial) == 0
    assert trial.cache.pins.total() == PinnedTotal()


def test_what_two_have_pinned_goes_with_the_last_of_them() -> None:
    cache = _trial(EXAMPLES[0]).cache
    for owner in ("one", "other"):
        assert cache.pin(as_tokens(CHAT[:20]), namespace="", until=5.0, owner=owner)
    pin = cache.pin_of(as_tokens(CHAT[:20]), namespace="")
    assert pin is not None
    assert not cache.unpin(pin.id, namespace="", owner="stranger")
    assert cache.unpin(pin.id, namespace="", owner="one")
    assert not cache.unpin(pin.id, namespace="", owner="one")
    assert [len(cache.list_pins("", owner=owner).pins) for owner in ("one", "other")] == [0, 1]
    assert cache.unpin(pin.id, namespace="", owner="other")
    assert cache.pins.total() == PinnedTotal()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_what_cannot_be_resumed_cannot_be_pinned(layout: Layout) -> None:
    trial = _trial(layout)
    other = (*CHAT[:20], 99)
    assert not trial.cache.pin(as_tokens(other), namespace="", until=5.0)
    assert not trial.cache.pin(as_tokens(CHAT[:20]), namespace="another", until=5.0)
    assert not trial.cache.pin(as_tokens(()), namespace="", until=5.0)
    if layout.has_snapshots:
        assert not trial.cache.pin(as_tokens(CHAT[:21]), namespace="", until=5.0)
    trial.cache.check()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_a_later_turn_retains_in_the_place_of_an_earlier_one(layout: Layout) -> None:
    trial = _trial(layout)
    assert trial.cache.pin(as_tokens(CHAT[:10]), namespace="", until=5.0)
    for at in (20, 30):
        assert trial.cache.retain(as_tokens(CHAT[:at]), namespace="", until=5.0)
    # The pin that was set by itself is no turn of the conversation, and stays.
    assert trial.cache.pins.total().num == 2
    assert _evict_all(trial) == 30
    if layout.has_snapshots:
        assert trial.cache.stats.snapshot_nbytes == 2 * SNAPSHOT_NBYTES
    trial.clock.now = 5.0
    assert _evict_all(trial) == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_the_pin_that_ends_first_is_lifted_first(layout: Layout) -> None:
    trial = _trial(layout)
    trial.cache.pin(as_tokens(CHAT[:20]), namespace="", until=9.0)
    trial.cache.pin(as_tokens(CHAT[:30]), namespace="", until=5.0)
    assert trial.cache.pins.unpin_first()
    assert _evict_all(trial) == 20
    assert trial.cache.pins.unpin_first()
    assert not trial.cache.pins.unpin_first()
    assert _evict_all(trial) == 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_of_too_many_pins_those_that_end_first_go_and_then_the_newest(layout: Layout) -> None:
    trial = CacheTrial(layout)
    forever, soon, later = ((n, *range(1, 20)) for n in (100, 101, 102))
    for tokens, until in ((forever, float("inf")), (soon, 5.0), (later, float("inf"))):
        trial.commit(tokens)
        trial.cache.pin(as_tokens(tokens), namespace="", until=until)
    each = trial.cache.pins.total().nbytes // 3
    assert trial.cache.pins.keep_within(3 * each) == 0
    assert trial.cache.pins.keep_within(2 * each) == 1
    assert [tuple(trial.cache.prefix_of(mark)) for mark in trial.cache.pins] == [forever, later]
    assert trial.cache.pins.keep_within(each) == 1
    assert [tuple(trial.cache.prefix_of(mark)) for mark in trial.cache.pins] == [forever]
    assert trial.cache.pins.keep_within(0) == 1
    trial.cache.check()


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_namespaces_are_cleared_and_counted_apart(layout: Layout) -> None:
    trial = CacheTrial(layout)
    for namespace in ("a", "b"):
        trial.commit(CHAT[:20], namespace=namespace)
        assert trial.cache.pin(as_tokens(CHAT[:20]), namespace=namespace, until=5.0)
    assert [trial.cache.tree.namespace_of(mark.node) for mark in trial.cache.pins] == ["a", "b"]
    assert (
        trial.cache.pins.total_of(trial.cache.pinned("a")).nbytes * 2
        == trial.cache.pins.total().nbytes
        == trial.cache.nbytes
    )
    trial.cache.clear("a")
    trial.cache.check()
    assert list(trial.cache.tree.roots) == ["b"]
    assert trial.cache.pins.total_of(trial.cache.pinned("a")) == PinnedTotal()
    assert trial.cache.pins.total().nbytes == trial.cache.nbytes > 0


@pytest.mark.parametrize("layout", EXAMPLES, ids=by_name)
def test_clearing_lets_all_pins_go(layout: Layout) -> None:
    trial = _trial(layout)
    trial.cache.pin(as_tokens(CHAT[:20]), namespace="", until=9.0)
    trial.cache.retain(as_tokens(CHAT[:30]), namespace="", until=9.0)
    trial.clear()
    trial.cache.check()
    assert trial.cache.nbytes == 0


def test_a_pin_holds_its_path_alone_when_the_chat_has_branches() -> None:
    trial = _trial(EXAMPLES[0])
    trial.commit((*CHAT[:20], *range(100, 120)), kind=BoundaryKind.GENERATION_END)
    trial.cache.pin(as_tokens(CHAT[:30]), namespace="", until=9.0)
    assert _evict_all(trial) == 30
    assert trial.cache.stats.num_tokens == 30
