"""Memory of the device and the process, default budgets, MLX's buffer pool, and Python's garbage collector.

A full collection stops every thread, and so every stream: what lives as long as the process is excluded from it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from typing import Any, cast
from weakref import ref

import mlx.core as mx
import psutil

from reprise.core.errors import first_line, memory_too_small
from reprise.core.follow import bound_for, budget_within, free_buffers
from reprise.core.pass_price import PassReading
from reprise.core.settings import Settings
from reprise.core.sizes import nbytes_text
from reprise.engine.machine import macos_footprint, read_machine
from reprise.engine.models.load import LoadedModel

log = logging.getLogger(__name__)

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

_MARGIN = 0.85
"""The share of the memory left by the model that layer states may use; the rest is for activations."""

_WIRED_SHARE = 0.9
"""Weights that take more than this share of the working set leave too little of it for anything else."""


def device_bytes() -> int:
    """Bytes that one process may use: Metal's recommended working set, the GPU's memory, or the machine's."""
    info = cast(dict[str, Any], mx.device_info())
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if mx.default_device() == mx.Device(mx.gpu) and int(info.get(key, 0)) > 0:
            return int(info[key])
    return int(psutil.virtual_memory().available) + mx.get_active_memory()


def working_set_nbytes() -> int | None:
    """How much memory macOS lets the GPU keep wired (`iogpu.wired_limit_mb`); None on other devices."""
    nbytes = cast(dict[str, Any], mx.device_info()).get("max_recommended_working_set_size")
    return None if nbytes is None else int(nbytes)


def keep_resident() -> None:
    """Have macOS keep this process's buffers wired, up to the working set. Does nothing on other devices.

    The limit reserves nothing: only what is allocated is wired. Without it, macOS may page weights out between two
    steps, and a model that takes most of the memory decodes many times slower.
    """
    nbytes = working_set_nbytes()
    if nbytes is None:
        return
    try:
        mx.set_wired_limit(nbytes)
    except RuntimeError as error:
        log.warning("macOS may page this server's memory out, which can make it slow: %s", first_line(error))


def paging_hint(model_nbytes: int) -> str:
    """What to do about weights that nearly fill the working set, or exceed it; "" if there is room for them."""
    working_set = working_set_nbytes()
    if working_set is None or model_nbytes <= working_set * _WIRED_SHARE:
        return ""
    wanted_mb = -(-int(model_nbytes / _WIRED_SHARE) // 2**20)
    return (
        f"macOS lets the GPU keep {nbytes_text(working_set)} in memory, the weights are {nbytes_text(model_nbytes)}: "
        "they may be paged out, which is very slow. Choose a stronger quantization, or, if the machine has the memory, "
        f"raise the limit until the next restart with `sudo sysctl iogpu.wired_limit_mb={wanted_mb}`."
    )


def process_nbytes() -> int:
    """The memory of this process as the system measures it, plus MLX's device memory on CUDA.

    Resident memory on Linux; on macOS its footprint, which includes Metal's buffers.
    """
    process = psutil.Process()
    by_mlx = mx.get_active_memory() + mx.get_cache_memory()
    if sys.platform == "darwin":
        footprint = macos_footprint()
        # At least the buffers, whether or not the system counts them.
        return max(int(process.memory_full_info().uss) if footprint is None else footprint, by_mlx)
    resident = int(process.memory_info().rss)
    return resident + by_mlx if mx.default_device() == mx.Device(mx.gpu) else resident


def used_nbytes() -> int:
    """Bytes that MLX has in use: weights, states and intermediate results."""
    return mx.get_active_memory()


def pool_nbytes() -> int:
    """Bytes of freed buffers that MLX keeps for reuse."""
    return mx.get_cache_memory()


def watch_peak() -> int:
    """Measure the peak of what MLX has in use from now on; returns what it has in use."""
    mx.reset_peak_memory()
    return mx.get_active_memory()


def read_peak(before: int) -> PassReading:
    """What a pass took since `watch_peak`, which gave `before`."""
    return PassReading.of(before=before, peak=mx.get_peak_memory(), after=mx.get_active_memory())


def kept_for_passes(settings: Settings, *, weights_nbytes: int, budget: int | None) -> int | None:
    """Bytes that weights and `budget` leave for intermediate results, of the device or of `--memory`; None: unlimited.

    0 where they leave none: passes are then charged to the budget.
    """
    if budget is None:
        return None
    left = device_bytes() - weights_nbytes - budget
    if settings.memory is not None:
        # What this process takes beside weights and states is in it already.
        bound = settings.memory.of(read_machine().total)
        left = min(left, bound - process_nbytes() - budget - free_buffers(budget))
    return max(0, left)


def default_budget(model_nbytes: int) -> int:
    """Default bytes for prefix cache and live sequences: the device's memory less the model and a margin."""
    return max(64 * 2**20, room_beside(model_nbytes))


def room_beside(model_nbytes: int, *, device_nbytes: int | None = None) -> int:
    """Bytes that a model leaves for layer states, less a margin; negative if it does not fit.

    `device_nbytes`: of another device than this one.
    """
    return int(((device_bytes() if device_nbytes is None else device_nbytes) - model_nbytes) * _MARGIN)


def cache_budget(settings: Settings, loaded: LoadedModel, *, least: int) -> int:
    """Bytes for the prefix cache and live sequences. Raises LoadFailed if that is less than `least`."""
    wanted = default_budget(loaded.nbytes) if settings.cache_bytes is None else settings.cache_bytes.of(device_bytes())
    if loaded.room_elsewhere is not None:
        wanted = min(wanted, loaded.room_elsewhere)
    if settings.memory is None:
        return wanted
    # Do not count buffers that loading has freed.
    give_back()
    process = process_nbytes()
    bound = settings.memory.of(read_machine().total)
    budget = min(wanted, budget_within(bound, process))
    if budget < least:
        raise memory_too_small(loaded.name, bound=bound, needed=bound_for(process, least))
    return budget


def budget_of_all(settings: Settings) -> int:
    """Bytes for the weights and layer states of all models of a server, before any is loaded."""
    wanted = room_beside(0)
    if settings.memory is None:
        return wanted
    return min(wanted, budget_within(settings.memory.of(read_machine().total), process_nbytes()))


def max_state_nbytes(settings: Settings) -> int | None:
    """Bytes for the layer states of all models as set by `--cache-bytes`; None: whatever the weights leave."""
    return None if settings.cache_bytes is None else settings.cache_bytes.of(device_bytes())


def bound_free_buffers(budget: int | None) -> None:
    """Limit MLX's pool of freed buffers to an eighth of the budget, at most 512 MiB."""
    mx.set_cache_limit(free_buffers(budget if budget is not None else 2**63))


def give_back() -> None:
    """Return freed buffers to the system, or on a CPU to the C library: see `trim_heap`."""
    mx.clear_cache()


def trim_heap() -> None:
    """Have the C library return freed memory to the system, where that can be asked for (glibc). Thread-safe.

    Takes about 10 ms per GB of heap, and 0.4 s per GB that is returned.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX or its allocator raised for lack of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in text for sign in ("out of memory", "unable to allocate", "malloc", "insufficient memory", "bad_alloc")
    )


def leave_thread() -> None:
    """To be the last MLX call of a thread: one that ends with its own streams crashes the process at exit."""
    mx.synchronize()
    mx.clear_streams()


def computing_device() -> str:
    """The device that MLX computes on, tested with a small sum: `gpu` or `cpu`. Raises RuntimeError if it fails."""
    if (mx.array([1, 2]) + 1).tolist() != [2, 3]:
        raise RuntimeError("a sum came out wrong")
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def freeze_heap() -> None:
    """Exclude everything that exists now from later collections.

    Modules, models and tokenizers are about 500,000 objects that live as long as the process. Traversing them takes a
    tenth of a second or more, during which no thread runs.
    """
    gc.collect()
    gc.freeze()


def collect_all(*models: ref[Any]) -> None:
    """Free every unreachable object, including frozen ones, and freeze the rest again if anything was frozen.

    Frozen objects are not traversed if a collection without them already frees all of `models`, that is, models loaded
    after the heap was frozen.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen or (models and all(model() is None for model in models)):
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
