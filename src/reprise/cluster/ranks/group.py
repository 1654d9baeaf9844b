"""Tensor parallelism: how the ranks of a group find each other, load their shards, and start.

mlx-lm shards the model (its `shard` method): each rank has some heads of every layer, and passes sum what the ranks
compute. All ranks load in the same way, including the trial passes; then rank 0 takes all decisions
(`reprise.cluster.ranks.operations`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from reprise.cluster.ranks.follower import FollowingRank
from reprise.cluster.ranks.launcher import RING, backend_of, host_of_rank_0
from reprise.cluster.ranks.leader import Leader
from reprise.cluster.ranks.links import Address, LinksToFollowers, LinkToLeader, Message, RanksFailed, is_lost_peer
from reprise.cluster.ranks.operations import set_recorder
from reprise.cluster.ranks.record_parts import ShardsElsewhere
from reprise.cluster.ranks.shards import ShardKeeper
from reprise.core.errors import DiskUnusable, LoadFailed, first_line
from reprise.core.follow import MemoryReading, tightest
from reprise.core.kinds import Footprint
from reprise.core.settings import Settings
from reprise.disk.folders.model_directory import file_system_nbytes
from reprise.disk.store.cache import DiskCache
from reprise.engine import memory as device_memory
from reprise.engine.machine import read_machine
from reprise.engine.models.load import LoadedModel, load_model, model_directory
from reprise.engine.models.model_files import read_config
from reprise.engine.running.batching import reason_to_run_alone
from reprise.engine.running.runner import Runner, footprint_of
from reprise.engine.states.blueprint import OpaqueSpec

log = logging.getLogger("reprise.engine")

SHARDED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash", "longcat_flash_ngram", "minimax",
    "minimax_m3_vl", "ministral3", "mistral4", "muse_spark", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "step3p5",
)  # fmt: skip
"""The modules of mlx-lm whose models have a `shard` method."""

_CONNECT_S = 60.0
_CLOSED_S = 20.0
"""How long a rank writes its parts of records when it ends."""
_ADDRESS = 256
"""Size in bytes of the message with the address of rank 0."""


class LeadingRank:
    """Rank 0. `load` is called on the thread that will run the model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.links: LinksToFollowers | None = None
        self.leader: Leader | None = None
        self.num_ranks = 0

    def load(self) -> LoadedModel:
        """Connect to the other ranks and load a shard on each. Raises LoadFailed."""
        settings = self._settings
        facts = _facts(settings)
        with ended_if_alone(_meeting_s(settings)):
            group = _join()
            self.num_ranks = group.size()
            self.links = links = LinksToFollowers(
                host_of_rank_0(os.environ), group.size(), silent_s=settings.stall_after_s
            )
            _tell_address(str(links.address))
        links.accept(facts, within_s=_CONNECT_S)
        links.send(["load"])
        try:
            loaded = _load_shard(settings, group)
            reports = links.next_reports(within_s=settings.stall_after_s)
        except Exception as error:
            if links.failure is not None:
                raise LoadFailed(str(links.failure)) from error
            links.close()
            raise
        own = _footprint(footprint_of(loaded.model, loaded.blueprint))
        for rank, report in reports.items():
            if report["footprint"] != own:
                raise LoadFailed(f"The shard of rank {rank} differs in size from that of rank 0.")
        links.begin_watch()
        self.leader = leader = Leader(loaded.blueprint.layout.kinds, links.send, fail=links.fail)
        set_recorder(leader.run)
        room = min(int(report["room"]) for report in reports.values())
        log.info("%d ranks hold %s", group.size(), loaded.name)
        shards = ShardsElsewhere(
            links, group.size() - 1, name_record=leader.name_record, opened_within_s=settings.stall_after_s
        )
        # Of all weights: what is on disk is of no use if those of any rank have changed, or their number.
        fingerprints = [loaded.fingerprint, *(str(reports[rank]["fingerprint"]) for rank in sorted(reports))]
        fingerprint = hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:32]
        return replace(
            loaded, may_run_ahead=False, room_elsewhere=room, parts_elsewhere=shards, fingerprint=fingerprint
        )

    def when_failed(self, tell: Callable[[RanksFailed], None]) -> None:
        """Call `tell` when another rank exits, hangs or fails; immediately if one already has."""
        assert self.links is not None, "called after `load`"
        self.links.on_failure = tell
        if self.links.failure is not None:
            tell(self.links.failure)

    def read_machines(self) -> MemoryReading:
        """The memory of the machine with the least available."""
        pongs = list(self.links.pongs.values()) if self.links is not None else []
        others = [MemoryReading(available=free, total=total, is_pressed=pressed) for free, total, pressed in pongs]
        return tightest(read_machine(), *others)

    def close(self) -> None:
        """Stop the other ranks."""
        if self.links is not None:
            self.links.close()


def follow(settings: Settings, *, on_ready: Callable[[], None], on_end: Callable[[], None]) -> None:
    """Run a rank other than 0 on this thread, until rank 0 stops it.

    `on_ready` is called when the model is loaded; `on_end`, on another thread, when rank 0 exits without stopping this
    rank. Raises LoadFailed.
    """
    facts = _facts(settings)
    with ended_if_alone(_meeting_s(settings)):
        group = _join()
        address = Address.parse(_tell_address(""))
    link = LinkToLeader(address, group.rank(), facts, silent_s=settings.stall_after_s, on_end=on_end)
    try:
        _expect(link.receive(), "load")
        loaded = _load_shard(settings, group)
        follower = FollowingRank(Runner(loaded, can_batch=True), partial(open_parts, settings, group.rank(), link.send))
        room = device_memory.cache_budget(settings, loaded, least=0)
        device_memory.bound_free_buffers(room)
        footprint = _footprint(footprint_of(loaded.model, loaded.blueprint))
        link.send({"footprint": footprint, "room": room, "fingerprint": loaded.fingerprint})
        # Rank 0 runs this trial too, and its passes need all ranks.
        reason_to_run_alone(loaded)
        log.info("rank %d of %d follows rank 0 at %s", group.rank(), group.size(), address.host)
        on_ready()
        while (message := link.receive()) != ["end"]:
            if message == ["ping"]:
                reading = read_machine()
                if reading.is_pressed or reading.available < reading.reserve:
                    device_memory.give_back()
                link.send(["pong", reading.available, reading.total, reading.is_pressed])
            else:
                follower.follow(message)
        if follower.shards is not None:
            follower.shards.close(_CLOSED_S)
    except Exception as error:
        if not is_lost_peer(error):
            log.critical("rank %d has failed", group.rank(), exc_info=error)
        link.send(["failed", f"{type(error).__name__}: {first_line(error)}"])
        raise


def open_parts(
    settings: Settings,
    rank: int,
    tell: Callable[[Message], None],
    fingerprint: str,
    *,
    block: int,
    resumes_anywhere: bool,
) -> ShardKeeper | None:
    """This rank's parts of records on disk, of which it will `tell` rank 0; None if they cannot be used."""
    assert settings.disk_directory is not None, "rank 0 has one"
    directory = Path(settings.disk_directory).expanduser()
    max_bytes = settings.disk_bytes.of(file_system_nbytes(directory))
    try:
        if max_bytes == 0:
            raise DiskUnusable("--disk-bytes is 0.")
        disk = DiskCache(
            directory,
            # Another folder than that of other ranks, which may have the same directory.
            fingerprint=f"{fingerprint} rank {rank}",
            max_bytes=max_bytes,
            block=block,
            resumes_anywhere=resumes_anywhere,
        )
    except DiskUnusable as error:
        tell({"unusable": str(error)})
        return None
    tell({"unusable": None, "max_bytes": max_bytes, "keys": [key.hex() for key in disk.all_keys()]})
    return ShardKeeper(disk, lambda number, form: tell(["answer", number, form]))


@contextmanager
def ended_if_alone(within_s: float) -> Generator[None]:
    """End this process with SIGALRM if the ranks have not met within this many seconds."""
    log.info("waiting for the other ranks; without them this one ends after %.0f s", within_s)
    # MLX holds Python's lock while it waits: no other thread would run, and no handler of a signal.
    signal.setitimer(signal.ITIMER_REAL, within_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _meeting_s(settings: Settings) -> float:
    return max(_CONNECT_S, settings.stall_after_s)


def _expect(message: Any, wanted: str) -> None:
    if message == ["end"]:
        raise LoadFailed("Rank 0 could not start the model; see its log.")
    if message != [wanted]:
        raise LoadFailed(f"Rank 0 sent {str(message)[:40]} where {wanted!r} was expected.")


def _join() -> mx.distributed.Group:
    """The group of all ranks. Raises LoadFailed."""
    try:
        group = mx.distributed.init(strict=True, backend=backend_of(os.environ) or RING)
    except Exception as error:
        raise LoadFailed(f"The ranks could not connect to each other: {first_line(error)}") from error
    if group.size() < 2:
        raise LoadFailed("--tensor-parallel needs at least two ranks: start it with mlx.launch -n 2 --backend ring.")
    return group


def _tell_address(text: str) -> str:
    """Broadcast the text of rank 0; the other ranks pass "". Raises LoadFailed."""
    raw = text.encode().ljust(_ADDRESS, b"\0")
    assert len(raw) == _ADDRESS, text
    shared = mx.distributed.all_sum(mx.array(np.frombuffer(raw, dtype=np.uint8).astype(np.int32)))
    try:
        mx.eval(shared)
    except Exception as error:
        raise LoadFailed(f"A rank has ended while the others connected to it: {first_line(error)}") from error
    return bytes(np.array(shared).astype(np.uint8)).rstrip(b"\0").decode()


def _load_shard(settings: Settings, group: mx.distributed.Group) -> LoadedModel:
    loaded = load_model(
        settings.model,
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        chat_template=settings.chat_template,
        learnt=settings.learnt,
        trusts_remote_code=settings.trusts_remote_code,
        shard=lambda model: _shard(model, settings.model, group),
    )
    if any(isinstance(spec, OpaqueSpec) for spec in loaded.blueprint.leaves):
        raise LoadFailed(
            f"{settings.model}: models of type {loaded.architecture} have layer states of an unknown class, so they "
            "cannot be split over ranks. Run it on one machine."
        )
    return loaded


def _shard(model: nn.Module, source: str, group: mx.distributed.Group) -> None:
    """Reduce a model, before its weights are loaded, to the shard of this rank."""
    shard = getattr(model, "shard", None)
    if shard is None:
        raise LoadFailed(
            f"{source}: mlx-lm {version('mlx-lm')} cannot split this architecture over ranks. It splits: "
            f"{', '.join(SHARDED)}."
        )
    try:
        shard(group)
    except Exception as error:
        raise LoadFailed(
            f"{source} cannot be split over {group.size()} ranks: {first_line(error)} The number of heads must be "
            "divisible by the number of ranks."
        ) from error


def _facts(settings: Settings) -> dict[str, str]:
    """What must be the same on all ranks. Raises LoadFailed."""
    config = read_config(model_directory(settings.model), settings.model)
    keeps = settings.disk_directory is not None and settings.has_prefix_cache
    options = [settings.kv_bits, settings.kv_group_size, settings.chat_template]
    return {
        "model": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "--kv-bits, --kv-group-size or --chat-template": hashlib.sha256(repr(options).encode()).hexdigest(),
        "--disk-cache": str(keeps),
        "version of Reprise": version("mlx-reprise"),
        "version of MLX": version("mlx"),
        "version of mlx-lm": version("mlx-lm"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _footprint(footprint: Footprint) -> list[object]:
    """The footprint as JSON would return it."""
    return [*([str(kind), nbytes] for kind, nbytes in footprint.by_kind.items()), footprint.snapshot]
