import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of small files: that each is waited for is tested by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
