"""Which thread runs: the engine's, or another."""

from __future__ import annotations

import threading


class ThisThread(threading.local):
    is_engine = False


THIS_THREAD = ThisThread()
"""What the calling thread is. What only an engine thread may do asserts it."""
