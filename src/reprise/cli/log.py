"""The log of a server: lines for people, for files and for machines, and the same text at most once a second."""

import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reprise.cli.log_file import LogFileHandler
from reprise.core.errors import RepriseError
from reprise.core.settings import Settings

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class CannotLog(RepriseError):
    """The log file cannot be written; the sentence says why."""

    code = "cannot_log"


def configure_logging(settings: Settings) -> None:
    """Log to standard error, or to a file: standard output says where the server is, and nothing else."""
    handler: logging.Handler
    if settings.log_file is not None:
        try:
            handler = LogFileHandler(Path(settings.log_file))
        except OSError as error:
            raise CannotLog(f"Cannot write the log file {settings.log_file}: {error.strerror}.") from error
        handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines(_LINE))
    elif settings.log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    elif sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 (for a person at a terminal alone)
        from rich.logging import RichHandler  # noqa: PLC0415

        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        handler.setFormatter(TextLines("%(message)s"))
    else:
        # A file or a journal: one line for each record, whatever its length.
        handler = logging.StreamHandler()
        handler.setFormatter(TextLines(_LINE))
    handler.addFilter(OncePerSecond())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    logging.getLogger("reprise").setLevel(max(level, logging.WARNING) if settings.is_quiet else level)


class TextLines(logging.Formatter):
    """A record as a line of text, with a traceback or stack indented below it.

    Messages contain what clients send. Nothing of that can begin a line, or control a terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of the base)
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name of the base)
        return _indented(_explanation(ei[1]) or super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (the name of the base)
        return _indented(super().formatStack(stack_info))


def _explanation(error: BaseException | None) -> str | None:
    """The message of an error that needs no traceback."""
    return str(error) if isinstance(error, RepriseError) and error.is_explained else None


def _printable(text: str) -> str:
    """The text with line breaks, control characters and the like written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {_printable(line)}" for line in text.split("\n"))


class JsonLines(logging.Formatter):
    """A record as a JSON object: time (ISO 8601, UTC), level, logger, message; a traceback or stack if any."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            body["traceback"] = _explanation(record.exc_info[1]) or self.formatException(record.exc_info)
        if record.stack_info:
            body["stack"] = record.stack_info
        return json.dumps(body, ensure_ascii=False)


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
