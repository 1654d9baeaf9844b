"""A log that says the same thing once a second at most."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_KNOWN = 256


class OncePerSecond(logging.Filter):
    """Drops a record whose text was logged within the last second; the next one says how often. For a handler."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()
        """When each text was last logged, and how often it came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        key = (record.name, record.levelno, text)
        now_s = self._clock()
        with self._lock:
            last_s, num_dropped = self._known.get(key, (None, 0))
            if last_s is not None and now_s - last_s < 1.0:
                self._known[key] = (last_s, num_dropped + 1)
                return False
            self._known[key] = (now_s, 0)
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        if num_dropped > 0:
            record.msg, record.args = f"{text} (and {num_dropped} more times)", None
        return True
