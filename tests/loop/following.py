"""A group of two ranks in one process: an engine, and a follower that runs its operations on the same weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx

from reprise.cluster.ranks.codec import Numbered
from reprise.cluster.ranks.follower import FollowingRank
from reprise.cluster.ranks.group import open_parts
from reprise.cluster.ranks.leader import Leader
from reprise.cluster.ranks.links import RanksFailed
from reprise.cluster.ranks.operations import set_recorder
from reprise.cluster.ranks.record_parts import ShardsElsewhere
from reprise.core.settings import Settings
from reprise.disk.records.record import DiskRecord
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.records import RecordEncoder, RecordSource, RestoringSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.layers import KvLayer
from reprise.engine.states.payloads import PackedSegment, Snapshot


@dataclass(slots=True, eq=False)
class LeaderAndFollower:
    """What `load` gives is run by a leader, and by a follower that gets its messages as bytes."""

    load: Callable[[], LoadedModel]
    follower_settings: Settings | None = None
    """Where the follower has its parts of records on disk; None: nowhere."""
    leader: Leader | None = None
    follower: FollowingRank | None = None
    names: set[str] = field(default_factory=set)
    """The operations that were seen."""
    failures: list[str] = field(default_factory=list)
    failure: RanksFailed | None = None
    shards: ShardsElsewhere | None = None
    on_answer: Callable[[int, int, Any], None] = lambda rank, number, answer: None
    _reports: list[Any] = field(default_factory=list)

    def __call__(self) -> LoadedModel:
        """The leader's model, on the thread that will run it."""
        loaded = self.load()
        self.end()
        open_shards = None
        if self.follower_settings is not None:
            open_shards = partial(open_parts, self.follower_settings, 1, self._tell)
        self.follower = FollowingRank(Runner(loaded, can_batch=True), open_shards)
        kinds = loaded.blueprint.layout.kinds
        self.leader = Leader(kinds, self.send, fail=self._fail, checked_every=7)
        set_recorder(self.leader.run)
        if self.follower_settings is None:
            return replace(loaded, may_run_ahead=False)
        self.shards = ShardsElsewhere(self, 1, name_record=self.leader.name_record, opened_within_s=60)
        return replace(loaded, may_run_ahead=False, parts_elsewhere=self.shards)

    def end(self) -> None:
        """Let the follower write its parts, as it does when rank 0 ends."""
        if self.follower is not None and self.follower.shards is not None:
            self.follower.shards.close(60)

    # Its links.

    def send(self, message: Any) -> None:
        assert self.follower is not None
        if message[0] == "run":
            self.names.add(message[3])
        self.follower.follow(json.loads(json.dumps(message)))

    def next_reports(self, *, within_s: float) -> dict[int, Any]:
        return {1: self._reports.pop()}

    def _tell(self, message: Any) -> None:
        match json.loads(json.dumps(message)):
            case ["answer", number, answer]:
                self.on_answer(1, number, answer)
            case report:
                self._reports.append(report)

    def _fail(self, why: str) -> RanksFailed:
        self.failures.append(why)
        return RanksFailed(why)

    def check(self) -> int:
        """Both hold the same objects, to the byte; gives how many. On the engine thread."""
        assert self.leader is not None and self.follower is not None
        self.leader.check()
        held = self.leader.held
        assert {number for number in held if number >= 0} == self.follower.objects.keys()
        for number, each in held.items():
            if isinstance(each, DiskRecord | RecordEncoder | RecordSource | RestoringSequence):
                continue  # Their forms were compared.
            mine, theirs = arrays_of(each), arrays_of(self.follower.objects[number])
            assert len(mine) == len(theirs), number
            for one, other in zip(mine, theirs, strict=True):
                assert one.dtype == other.dtype and mx.array_equal(one, other, equal_nan=True).item(), number
        return len(held)


def arrays_of(each: Numbered) -> list[mx.array]:
    """All that an object holds: of a sequence, the entries that count."""
    if isinstance(each, PackedSegment):
        return list(each.stacks)
    if isinstance(each, Snapshot):
        return [array for state in each.states for array in state if array is not None]
    assert isinstance(each, LiveSequence), each
    found: list[mx.array] = []
    for state in each.rows.states:
        if isinstance(state, KvLayer):
            found += [plane[:, :, state.end - state.held : state.end, :] for plane in state.planes]
        else:
            found += [array for array in state.cache if array is not None]
    return found
