"""What holds for all tests."""

import contextlib
import functools
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterator

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

from reprise.core.failpoints import ACTIONS
from tests.matrix import take_models_in_turn
from tests.sdks import IMPORTED, NAMES

# No test fails because a machine is slow. Else as hypothesis has it: other examples in each run, and always the same
# ones where the variable `CI` is set. `make test` has a few, `make test-all` takes the profile "thorough".
settings.register_profile("thorough", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=15)
settings.load_profile("quick")
# A failing example is made smaller for so long, and not for five minutes.
engine.MAX_SHRINKING_SECONDS = 20
# Until all tests are collected: what is imported and collected stays.
gc.disable()
# Each client of httpx reads the certificates of all authorities anew, and each invocation builds every command anew: 40
# milliseconds each, hundreds of times.
ssl.create_default_context = functools.cache(ssl.create_default_context)
assert hasattr(typer.testing, "_get_command")
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]


def pytest_configure() -> None:
    # The options of whoever runs the tests are no part of them.
    # Where to write what clients send is (`tests/agents/recording.py`).
    for name in [name for name in os.environ if name.startswith("REPRISE_") and name != "REPRISE_RECORD"]:
        del os.environ[name]
    os.environ["REPRISE_CONFIG"] = os.devnull
    # Nor is their cache directory.
    os.environ["REPRISE_DISK_CACHE"] = "off"
    # Nor is what nohup or a shell's background job ignores: servers would not end at these signals.
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
    # On the CPU another thread of MLX runs each operation, and is woken for it by ours: where all cores are busy, it
    # would take the core from ours each time, which costs more than the operations of these tiny models.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Of several processes that run tests each stays on a core of its own: changing it costs a seventh of all the time.

    A browser or an agent has to keep up with the server that answers it, so it has all of them.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and _CORES:
        is_client = any(item.get_closest_marker(name) for name in ("agents", "browser"))
        os.sched_setaffinity(0, _CORES if is_client else {_CORES[int(worker) % len(_CORES)]})


@pytest.fixture(autouse=True)
def no_failpoint_is_left() -> Iterator[None]:
    yield
    ACTIONS.clear()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test that starts a server in this process sets how much is logged for the whole process."""
    loggers = [logging.getLogger(), logging.getLogger("reprise")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = [handler for handler in logger.handlers if handler in handlers]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Here: MLX's first import takes seconds, and whoever only hands out tests to others need not have it.
    from tests.models.headed import HEADED  # noqa: PLC0415
    from tests.models.tiny import CONFIGS  # noqa: PLC0415

    take_models_in_turn(items, {*CONFIGS, *HEADED, "qwen3_vl", "gemma3", "gemma4"})


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED] = frozenset(NAMES) & sys.modules.keys()
    # Modules and tests stay: whoever looks for circles of references need not go through a million objects each time.
    gc.enable()
    gc.collect()
    gc.freeze()
