"""How much memory there is, and giving it back."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import mlx.core as mx
import psutil

from reprise.core.errors import first_line, memory_too_small
from reprise.core.follow import bound_for, budget_within, free_buffers
from reprise.core.settings import Settings
from reprise.core.sizes import nbytes_text
from reprise.engine.load import LoadedModel
from reprise.engine.machine import macos_footprint, read_machine

log = logging.getLogger(__name__)

_MARGIN = 0.85
"""The share of what is left beside the model that caches may take; the rest is for activations and others."""

_WIRED_SHARE = 0.9
"""Weights that take more than this share of the working set leave too little of it for anything else."""


def device_bytes() -> int:
    """What one process may use: the working set that Metal recommends, the GPU's memory, or the machine's."""
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
    """All that this process holds, as the system measures it, and on CUDA the device memory that MLX has beside it.

    That is its resident memory on Linux, and on macOS its footprint, in which Metal's buffers are.
    """
    process = psutil.Process()
    by_mlx = mx.get_active_memory() + mx.get_cache_memory()
    if sys.platform == "darwin":
        footprint = macos_footprint()
        # The buffers at least, whether or not the system counts them to the process.
        return max(int(process.memory_full_info().uss) if footprint is None else footprint, by_mlx)
    resident = int(process.memory_info().rss)
    return resident + by_mlx if mx.default_device() == mx.Device(mx.gpu) else resident


def used_nbytes() -> int:
    """What MLX has in use: weights, states and whatever is being computed."""
    return mx.get_active_memory()


def pool_nbytes() -> int:
    """Freed buffers that MLX keeps to use again."""
    return mx.get_cache_memory()


def default_budget(model_nbytes: int) -> int:
    """Bytes for the prefix cache and live caches together: what the device holds, less the model and a margin."""
    return max(64 * 2**20, room_beside(model_nbytes))


def room_beside(model_nbytes: int) -> int:
    """What the device leaves for layer states beside a model, less a margin; negative for one that does not fit."""
    return int((device_bytes() - model_nbytes) * _MARGIN)


def cache_budget(settings: Settings, loaded: LoadedModel, *, least: int) -> int:
    """Bytes for the prefix cache and live sequences together. Raises LoadFailed where that is less than `least`."""
    wanted = default_budget(loaded.nbytes) if settings.cache_bytes is None else settings.cache_bytes.of(device_bytes())
    if settings.memory is None:
        return wanted
    # What loading has left behind is nobody's.
    give_back()
    process = process_nbytes()
    bound = settings.memory.of(read_machine().total)
    budget = min(wanted, budget_within(bound, process))
    if budget < least:
        raise memory_too_small(loaded.name, bound=bound, needed=bound_for(process, least))
    return budget


def budget_of_all(settings: Settings) -> int:
    """Bytes for the weights and layer states of all models of a server, before any of them is loaded."""
    wanted = room_beside(0)
    if settings.memory is None:
        return wanted
    return min(wanted, budget_within(settings.memory.of(read_machine().total), process_nbytes()))


def most_state(settings: Settings) -> int | None:
    """Bytes for the layer states of all models together, where `--cache-bytes` says; None: what weights leave."""
    return None if settings.cache_bytes is None else settings.cache_bytes.of(device_bytes())


def bound_free_buffers(budget: int | None) -> None:
    """Keep MLX from holding on to more freed buffers than an eighth of the budget, and than 512 MiB."""
    mx.set_cache_limit(free_buffers(budget if budget is not None else 2**63))


def give_back() -> None:
    """Return freed buffers to the system."""
    mx.clear_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX (or the allocator below it) raised for lack of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in text for sign in ("out of memory", "unable to allocate", "malloc", "insufficient memory", "bad_alloc")
    )


def leave_thread() -> None:
    """The last MLX call of a thread: a thread that ends with streams of its own takes the process down at exit."""
    mx.synchronize()
    mx.clear_streams()


def computing_device() -> str:
    """What MLX computes on, tried with a small sum: `gpu` or `cpu`. Raises RuntimeError where it does not compute."""
    if (mx.array([1, 2]) + 1).tolist() != [2, 3]:
        raise RuntimeError("a sum came out wrong")
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
