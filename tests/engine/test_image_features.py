"""What the tower made of images is kept within memory: what requests need goes last."""

import mlx.core as mx
import numpy as np
import pytest

from reprise.core.images import ImageFile
from reprise.engine.running.image_features import FeatureCache
from reprise.engine.states.seeing import ImageFeatures
from reprise.memory import Account, Memory

NBYTES = 4 * 8 * 4


def of(name: str) -> ImageFile:
    return ImageFile(content=b"", digest=name.encode(), width=1, height=1)


def four_rows() -> ImageFeatures:
    return ImageFeatures(rows=mx.zeros((4, 8)), deep=(), places=np.arange(4))


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_they_are_charged_as_long_as_they_are_kept(memory: Memory) -> None:
    features = FeatureCache(memory)
    for name in ("a", "b", "a"):
        features.keep(of(name), four_rows())
        features.check()
    assert memory.nbytes(Account.IMAGES) == features.nbytes == 2 * NBYTES
    assert features.num_encoded == 3
    features.clear()
    assert memory.held == 0


def test_the_least_recently_used_goes_first_and_what_a_request_needs_when_nothing_else_is_left(memory: Memory) -> None:
    features = FeatureCache(memory)
    features.keep(of("held"), four_rows(), holder="request")
    features.keep(of("old"), four_rows())
    features.keep(of("new"), four_rows())
    assert features.find(of("old")) is not None
    gone: list[str] = []
    while features.release_one():
        gone += [name for name in ("held", "old", "new") if name not in gone and features.find(of(name)) is None]
    assert gone == ["new", "old"]
    assert not features.release_held([of("held")]), "what is still to be computed with stays"
    assert features.release_held([]) and not features.release_held([])
    assert features.find(of("held")) is None
    features.check()


def test_no_more_is_kept_than_its_share_but_for_what_requests_need(memory: Memory) -> None:
    features = FeatureCache(memory, most_nbytes=2 * NBYTES)
    for name in "abc":
        features.keep(of(name), four_rows(), holder=name)
    assert features.nbytes == 3 * NBYTES
    features.let_go("a")
    assert features.nbytes == 3 * NBYTES
    for name in "bc":
        features.let_go(name)
    assert features.nbytes == 2 * NBYTES
    assert features.find(of("a")) is None
    features.check()


def test_a_request_that_found_them_needs_them_too(memory: Memory) -> None:
    features = FeatureCache(memory)
    features.keep(of("a"), four_rows(), holder="first")
    assert features.find(of("a"), holder="second") is not None
    features.let_go("first")
    features.keep(of("b"), four_rows())
    assert features.release_one()
    assert features.find(of("b")) is None
    assert features.find(of("a")) is not None


def test_room_is_made_before_an_image_whose_size_is_known() -> None:
    memory = Memory(3 * NBYTES)
    features = FeatureCache(memory)
    memory.reclaim_from(features.release_one)
    for name in "abcd":
        features.make_room(4)
        features.keep(of(name), four_rows())
        assert memory.held <= 3 * NBYTES
    assert features.find(of("d")) is not None
