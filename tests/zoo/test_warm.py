"""Warm = cold on a real model of each composition of caches: the checks of `make matrix`, in one chunk size."""

import pytest

from reprise.engine.blueprint import blueprint_of
from tests.zoo.caches import available, build_any, one_of_each
from tools.matrix.batches import even_slices, ragged_decode
from tools.matrix.chunking import CUT_DEPENDENT
from tools.matrix.warm import CHUNKS, warm_against_cold


def assert_warm_is_cold(name: str, *, chunks: tuple[int | None, ...]) -> None:
    model = build_any(name)
    result = warm_against_cold(model, blueprint_of(model), chunks=chunks)
    assert result.missed == (), name
    assert result.gap.is_rounding, (name, result.gap)


def test_one_of_each_composition() -> None:
    for name in one_of_each():
        assert_warm_is_cold(name, chunks=(7,))


def test_batches_of_each_kind_that_joins() -> None:
    for name in ("qwen3", "llama", "gear", "falcon_h1", "longcat_flash_ngram"):
        model = build_any(name)
        blueprint = blueprint_of(model)
        assert ragged_decode(model, blueprint).is_rounding, name
        assert even_slices(model, blueprint).is_rounding, name


@pytest.mark.matrix
@pytest.mark.parametrize("name", available())
def test_all(name: str) -> None:
    assert_warm_is_cold(name, chunks=(1,) if name in CUT_DEPENDENT else CHUNKS)
