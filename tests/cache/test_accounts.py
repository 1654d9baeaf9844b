"""The owner of memory: accounts that balance, and who gives something up for whom, in which order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from reprise.cache.node import Segment, SegmentSizes
from reprise.cache.payload import SegmentPayload, SharedPayload
from reprise.cache.tree import RadixTree
from reprise.core.kinds import Full, Layout
from reprise.core.tokens import Span
from reprise.memory import Account, Memory, SharedMemory


class Holder:
    """Has things of one byte, and gives them up one by one."""

    def __init__(self, memory: Memory, name: str, asked: list[str], num: int) -> None:
        self.memory, self.name, self.asked, self.num = memory, name, asked, num
        memory.charge(Account.KV, num)

    def __call__(self) -> bool:
        self.asked.append(self.name)
        if self.num == 0:
            return False
        self.num -= 1
        self.memory.charge(Account.KV, -1)
        return True


def test_the_first_gives_up_all_that_it_has_before_the_next_gives_up_anything() -> None:
    memory, asked = Memory(budget=10), list[str]()
    first, second, third = (Holder(memory, name, asked, num) for name, num in (("a", 2), ("b", 3), ("c", 5)))
    memory.reclaim_from(first, second, third)
    assert memory.reserve(3)
    assert asked == ["a", "a", "a", "b"] and (first.num, second.num, third.num) == (0, 2, 5)
    assert not memory.reserve(11) and memory.held == 0, "everything was given up, and it does not fit"
    assert memory.reserve(10)


def test_bytes_that_change_hands_are_held_once() -> None:
    memory = Memory(budget=10)
    memory.charge(Account.SEQUENCES, 6)
    memory.transfer(Account.SEQUENCES, Account.KV, 4)
    assert (memory.nbytes(Account.SEQUENCES), memory.nbytes(Account.KV), memory.held) == (2, 4, 6)
    memory.check({Account.SEQUENCES: 2, Account.KV: 4, Account.INCOMING: 0})
    with pytest.raises(AssertionError):
        memory.check({Account.SEQUENCES: 6})


class ByWorth:
    """A cache of entries of one byte, by their score."""

    def __init__(self, memory: Memory, *scores: float, protected: int = 0) -> None:
        self.memory, self.scores, self.protected = memory, sorted(scores), protected
        memory.evict_from(self, token_s=lambda: 1.0)
        memory.reclaim_from(lambda: False, self.evict_one)
        memory.charge(Account.KV, len(scores))

    def least_score(self) -> float | None:
        return self.scores[0] if len(self.scores) > self.protected else None

    def evict_one(self) -> bool:
        if self.least_score() is None:
            return False
        self.scores.pop(0)
        self.memory.charge(Account.KV, -1)
        return True

    def protected_nbytes(self) -> int:
        return self.protected


def test_models_share_a_budget_and_what_is_worth_least_goes_first() -> None:
    shared = SharedMemory(12)
    shared.charge_weights({"a": 4})
    one, other = Memory(shared=shared), Memory(shared=shared)
    low, high = ByWorth(one, 1, 4, 6), ByWorth(other, 2, 3, 9, protected=1)
    assert (one.budget, one.held, one.available, one.kept_by_others) == (8, 3, 2, 1)
    assert one.evictable_from_others == 2
    assert one.reserve(5)
    assert (low.scores, high.scores) == ([4, 6], [9]), "1, 2 and 3 went, whoever asked"
    # A token that takes longer to compute is worth more, and so is one of a model that is asked more often.
    high.protected = 0
    other.evict_from(high, token_s=lambda: 0.1)
    assert other.reserve(6) and (low.scores, high.scores) == ([4, 6], [])
    for _ in range(50):
        shared.note_request(other)
    assert other.share_of_requests > 10 * one.share_of_requests


def test_weights_are_given_up_last() -> None:
    shared = SharedMemory(10)
    shared.charge_weights({"a": 4, "b": 4})
    memory = Memory(shared=shared)
    entries = ByWorth(memory, 1, 2)

    def unload_one() -> bool:
        assert not entries.scores
        was_loaded = "b" in shared.weights
        shared.charge_weights({"a": 4})
        return was_loaded

    shared.unload_one = unload_one
    assert memory.reserve(6) and shared.weights == {"a": 4}
    assert not memory.reserve(7) and (memory.budget, shared.state_nbytes) == (6, 0)


def test_layer_states_have_a_bound_of_their_own() -> None:
    shared = SharedMemory(10, max_state_nbytes=3)
    shared.charge_weights({"a": 4})
    memory = Memory(shared=shared)
    assert memory.budget == 3 and memory.reserve(3) and not memory.reserve(4)


def test_what_is_new_takes_the_place_of_another_model_s_only_where_it_is_worth_more() -> None:
    shared = SharedMemory(4)
    one, other = Memory(shared=shared), Memory(shared=shared)
    mine, theirs = ByWorth(one, 5, 6), ByWorth(other, 2, 7)
    assert one.evict_from_others(3) and theirs.scores == [7]
    assert not one.evict_from_others(6.5), "what is worth least is here"
    assert not one.evict_from_others(None)
    mine.scores = [8.0, 9.0]
    assert not one.evict_from_others(6.5) and one.evict_from_others(None) and not theirs.scores


def test_what_is_given_back_twice_is_noticed() -> None:
    memory = Memory()
    memory.charge(Account.SNAPSHOTS, 3)
    with pytest.raises(AssertionError):
        memory.charge(Account.SNAPSHOTS, -4)


@dataclass(frozen=True)
class OwnEntries:
    """Entries of one byte each that the tree has for itself."""

    nbytes: int

    def cut(self, start: int, stop: int) -> "OwnEntries":
        raise NotImplementedError

    def join(self, others: Sequence[SegmentPayload]) -> "OwnEntries":
        raise NotImplementedError


class SharedEntries(SharedPayload):
    """The same in the buffers of a sequence."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def sequence(self) -> object:
        return "a sequence"

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cut(self, start: int, stop: int) -> SegmentPayload:
        raise NotImplementedError

    def join(self, others: Sequence[SegmentPayload]) -> SegmentPayload:
        raise NotImplementedError


@pytest.mark.parametrize(("payload", "shared"), [(OwnEntries, 0), (SharedEntries, 1)])
def test_what_a_sequence_shares_is_counted_for_the_tree_and_falls_back(
    payload: Callable[[int], SegmentPayload], shared: int
) -> None:
    memory = Memory()
    memory.charge(Account.SEQUENCES, 20)
    tree = RadixTree(Layout(kinds=(Full(),)), memory, SegmentSizes())
    tokens = np.arange(8, dtype=np.int32)
    path = tree.extend(tree.walk(tokens, ""), tokens, "")
    tree.attach(path, Full(), Segment(Span(0, 8), payload(8)))
    assert memory.nbytes(Account.KV) == 8 and memory.held == 28 - 8 * shared
    tree.remove(path[-1])
    assert memory.nbytes(Account.KV) == 0 and memory.held == 20
