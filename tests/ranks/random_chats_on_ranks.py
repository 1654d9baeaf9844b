"""A program that `tests.ranks` starts as every rank: random chats on a group, compared with one process.

Rank 0 prints what was seen as JSON. Its oracle has the whole model and no prefix cache.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from reprise.cluster.ranks.group import LeadingRank, follow
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.loop import read_ahead, write_behind
from tests.loop.driving import DrivenEngine
from tests.loop.random_chats import RandomChats


def main(model: str, *, seed: int, num_bursts: int, cache_bytes: int, drafts: str, disk: str) -> None:
    # Small, so that both ranks evict.
    on_disk: dict[str, Any] = {"disk_directory": disk, "disk_bytes": Bytes(3_000_000)} if disk else {}
    settings = Settings(model=model, **on_disk)
    read_ahead.MIN_TOKENS = write_behind.SOON_S = 1
    if os.environ["MLX_RANK"] != "0":
        follow(settings, on_ready=lambda: None, on_end=lambda: os._exit(75))
        return
    ranks = LeadingRank(settings)
    engine = DrivenEngine(
        Path(model),
        load=ranks.load,
        shares_from=32,
        drafts=drafts,
        cache_bytes=cache_bytes or None,
        prefill_chunk=32,
        disk_block=16,
        **on_disk,
    )
    oracle = DrivenEngine(Path(model), has_prefix_cache=False, max_batch=1)
    assert ranks.links is not None and ranks.leader is not None
    try:
        seen = RandomChats(engine, oracle, seed, has_room=cache_bytes == 0).run(num_bursts)
        leader = ranks.leader
        engine.ask(lambda worker: leader.check())
        told = {"num_operations": leader.num_operations, "microseconds": 1e6 * leader.spent_s / leader.num_operations}
        told["loaded"] = engine.loop.status().counts.num_loaded
        sys.stdout.write(json.dumps({**dataclasses.asdict(seen), **told}) + "\n")
    finally:
        engine.close()
        oracle.close()
        ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
