"""What is said while a model is loaded."""

import logging
import threading
from pathlib import Path

import pytest

from reprise.api.loading import LoadingClock
from reprise.cli.engines import reported_loading


def test_loading_is_reported_until_it_is_over(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "so far" in record.getMessage():
                said.set()

    listener = Listener()
    logger = logging.getLogger("reprise.cli.engines")
    logger.addHandler(listener)
    caplog.set_level(logging.INFO, logger=logger.name)
    with reported_loading(str(tmp_path), LoadingClock(10**8), every_s=0.001):
        assert said.wait(30)
    logger.removeHandler(listener)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith(f"loading {tmp_path}: ")
    assert " of 100 MB (" in messages[0]
    assert messages[-1].startswith(f"loaded {tmp_path} in ")
