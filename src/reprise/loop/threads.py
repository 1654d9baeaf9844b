"""Which thread runs: the engine's, or another."""

from __future__ import annotations

import threading


class _ThisThread(threading.local):
    is_engine = False


_this_thread = _ThisThread()


def become_engine_thread() -> None:
    """Say that the calling thread is an engine thread."""
    _this_thread.is_engine = True


def on_engine_thread() -> bool:
    return _this_thread.is_engine
