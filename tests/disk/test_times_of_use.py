"""A time of use that a record takes over from one that is gone is written, though nothing else wakes the writer."""

import time
from pathlib import Path
from unittest.mock import patch

import pytest

from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.store.store import RecordStore
from tests.disk.chains import BLOCK, opened, put_path

CHAT = list(range(10))


@pytest.mark.parametrize("is_shared", [True, False])
def test_who_takes_over_a_time_of_use_wakes_the_writer(tmp_path: Path, *, is_shared: bool) -> None:
    with opened(tmp_path) as cache:
        *_, tail = put_path(cache, CHAT)
    folder, other = (ModelDirectory(tmp_path, fingerprint="model") for _ in range(2))
    store = RecordStore(folder, max_bytes=10**9, block=BLOCK, resumes_anywhere=False, clock=time.time)
    folder.path_of(tail.key).unlink()
    with patch.object(store.changed, "notify_all") as wake:
        if is_shared:
            store.scan()
        else:
            assert store.read(tail.key) is None
    assert tail.key not in store.index.entries
    assert store.index.unwritten_uses and wake.called
    other.release()
    folder.release()
