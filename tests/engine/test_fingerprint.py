"""The fingerprint of a model: every bit of its weights counts, wherever it is, and nothing that says the same."""

import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from reprise.engine.models.fingerprint import fingerprint_of
from reprise.engine.models.load import load_model
from tests.models.tiny import tiny_model

_LONG = (1 << 23) + (1 << 14) + 3
"""More words than are summed at a time."""


def of(array: mx.array) -> str:
    return fingerprint_of({"weight": array}, {})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8])
@pytest.mark.parametrize("size", [1, 7, 16_385])
def test_each_bit_counts(dtype: mx.Dtype, size: int) -> None:
    array = mx.array(np.arange(size) % 100).astype(dtype)
    content = np.asarray(array.view(mx.uint8))
    seen = {of(array)}
    places = [(byte, bit) for byte in sorted({0, content.size // 2, content.size - 1}) for bit in (0, 7)]
    for byte, bit in places:
        changed = content.copy()
        changed[byte] ^= 1 << bit
        seen.add(of(mx.array(changed).view(dtype)))
    assert len(seen) == 1 + len(places)


def test_the_end_of_a_long_array_counts() -> None:
    ones = mx.ones((_LONG,), mx.uint8).view(mx.uint8)
    changed = mx.concatenate([ones[:-1], mx.zeros((1,), mx.uint8)])
    words = mx.ones((_LONG,), mx.uint32)
    changed_words = mx.concatenate([words[: 1 << 23], mx.zeros((1,), mx.uint32), words[(1 << 23) + 1 :]])
    assert len({of(ones), of(changed), of(words), of(changed_words)}) == 4


def test_places_signs_names_and_shapes_count() -> None:
    array = mx.arange(40, dtype=mx.float32)
    rows = array.reshape(8, 5)
    same = {
        of(array),
        of(rows),
        of(array.view(mx.uint32)),
        of(mx.concatenate([array[20:], array[:20]])),
        # Two signs at once, which a plain sum of words would not see.
        of(mx.where(mx.arange(40) > 37, -array, array)),
        fingerprint_of({"bias": array}, {}),
        fingerprint_of({"weight": array}, {"kv": 4}),
        fingerprint_of({"weight": array}, {}, of="a base"),
    }
    assert len(same) == 8
    assert of(mx.array(np.arange(40, dtype=np.float32)).reshape(5, 8).T) == of(mx.contiguous(array.reshape(5, 8).T))


def test_the_same_in_every_process() -> None:
    """It names folders on disk."""
    assert of(mx.arange(40, dtype=mx.float32)) == "e5c99d58b6b7a878abf84f39732f5dfe"


def test_a_file_that_was_changed_under_its_old_size_and_time(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    file = directory / "model.safetensors"
    before, times = load_model(str(directory)).fingerprint, file.stat()
    assert load_model(str(shutil.copytree(directory, tmp_path / "copy"))).fingerprint == before
    content = bytearray(file.read_bytes())
    content[-1001] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    assert load_model(str(directory)).fingerprint != before
