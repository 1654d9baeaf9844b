"""A program that `tests.ranks` starts as every rank: random chats on a group, compared with one process.

Rank 0 prints what was seen as JSON. Its oracle has the whole model and no prefix cache.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from reprise.core.settings import Settings
from reprise.engine.ranks import LeadingRank, follow, rank_here
from tests.loop.driving import Engine
from tests.loop.random_chats import RandomChats


def main(model: str, seed: int, num_bursts: int, cache_bytes: int, drafts: str) -> None:
    settings = Settings(model=model)
    if rank_here() != 0:
        follow(settings, on_ready=lambda: None, on_end=lambda: os._exit(75))
        return
    ranks = LeadingRank(settings)
    engine = Engine(
        Path(model), load=ranks.load, shares_from=32, drafts=drafts, cache_bytes=cache_bytes or None, prefill_chunk=32
    )
    oracle = Engine(Path(model), has_prefix_cache=False, max_batch=1)
    assert ranks.links is not None and ranks.leader is not None
    try:
        seen = RandomChats(engine, oracle, seed, has_room=cache_bytes == 0).run(num_bursts)
        leader = ranks.leader
        engine.ask(lambda worker: leader.check())
        told = {"num_operations": leader.num_operations, "microseconds": 1e6 * leader.spent_s / leader.num_operations}
        sys.stdout.write(json.dumps({**dataclasses.asdict(seen), **told}) + "\n")
    finally:
        engine.close()
        oracle.close()
        ranks.close()


if __name__ == "__main__":
    _, _model, _seed, _bursts, _bytes, _drafts = sys.argv
    main(_model, int(_seed), int(_bursts), int(_bytes), _drafts)
