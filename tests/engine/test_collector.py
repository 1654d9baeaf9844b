"""What is frozen is not searched by collections, and what is unreachable goes even so when all is collected."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from reprise.engine.memory import collect_all, freeze_heap


class SelfReference:
    """Refers to itself, as models and their layers do."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Without what the tests themselves have frozen, which is frozen again: a million objects would be searched in
    each collection of the tests that follow."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.matrix
def test_what_was_frozen_goes_when_all_is_collected() -> None:
    knot = SelfReference()
    gone = weakref.ref(knot)
    freeze_heap()
    del knot
    gc.collect()
    assert gone() is not None
    collect_all()
    assert gone() is None
    assert gc.get_freeze_count() > 0


def test_what_is_frozen_is_left_alone_where_what_is_wanted_goes_without() -> None:
    frozen = SelfReference()
    freeze_heap()
    late = SelfReference()
    gone = [weakref.ref(frozen), weakref.ref(late)]
    del frozen, late
    collect_all(gone[1])
    assert [each() is None for each in gone] == [False, True]
    collect_all(*gone)
    assert gone[0]() is None


def test_a_program_of_others_is_not_frozen() -> None:
    collect_all()
    assert gc.get_freeze_count() == 0
