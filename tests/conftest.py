"""What holds for all tests."""

import contextlib
import os

from hypothesis import HealthCheck, settings

# No test fails because a machine is slow. Else as hypothesis has it: other examples in each run, and always the same
# ones where the variable `CI` is set.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure() -> None:
    # The options of whoever runs the tests are no part of them.
    for name in [name for name in os.environ if name.startswith("REPRISE_")]:
        del os.environ[name]
    os.environ["REPRISE_CONFIG"] = os.devnull
    # On the CPU another thread of MLX runs each operation, and is woken for it by ours: where all cores are busy, it
    # would take the core from ours each time, which costs more than the operations of these tiny models.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
