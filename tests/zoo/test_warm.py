"""Warm = cold on a real model of each composition of caches: the checks of `make matrix`, in fewer chunk sizes."""

import pytest

from reprise.engine.states.blueprint import blueprint_of
from tests.matrix import now_and_later
from tests.zoo.caches import EACH_KIND, available, build_any
from tools.matrix.batches import even_slices, ragged_decode
from tools.matrix.chunking import CUT_DEPENDENT
from tools.matrix.warm import warm_against_cold


def assert_warm_is_cold(name: str, *, chunks: tuple[int | None, ...]) -> None:
    model = build_any(name)
    result = warm_against_cold(model, blueprint_of(model), chunks=chunks)
    assert result.missed == (), name
    assert result.gap.is_rounding, (name, result.gap)


@pytest.mark.parametrize("name", now_and_later(EACH_KIND[1:], EACH_KIND[:1]))
def test_one_of_each_kind(name: str) -> None:
    assert_warm_is_cold(name, chunks=(7,))


@pytest.mark.parametrize("name", now_and_later(["gear", "falcon_h1"], ["qwen3", "llama", "longcat_flash_ngram"]))
def test_batches_of_each_kind_that_joins(name: str) -> None:
    model = build_any(name)
    blueprint = blueprint_of(model)
    assert ragged_decode(model, blueprint).is_rounding
    assert even_slices(model, blueprint).is_rounding


@pytest.mark.matrix
@pytest.mark.parametrize("name", available())
def test_all(name: str) -> None:
    assert_warm_is_cold(name, chunks=(1,) if name in CUT_DEPENDENT else (7, None))
