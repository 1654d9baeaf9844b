from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.restarts import Restarts


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Restarts]:
    """Starts an engine on a directory of this test, and ends the one before."""
    begin = Restarts(tmp_path / "disk")
    yield begin
    begin.end()
