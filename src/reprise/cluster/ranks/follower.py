"""A rank other than 0: runs the operations of rank 0, in order, on its own shard. It takes no decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from reprise.cluster.ranks.codec import Coded, Decoder, Numbered, numbered_in
from reprise.cluster.ranks.leader import digest_of
from reprise.cluster.ranks.operations import OPERATIONS, QUEUE_PART, one_operation, wrap_engine
from reprise.cluster.ranks.shards import ShardKeeper
from reprise.core.tokens import Tokens
from reprise.disk.records.record import DiskRecord
from reprise.engine.running.records import RecordEncoder
from reprise.engine.running.runner import Runner


class FollowingRank:
    """The objects of one rank, by the numbers that rank 0 assigned."""

    def __init__(self, runner: Runner, open_shards: Callable[..., ShardKeeper | None] | None = None) -> None:
        """`open_shards` opens this rank's parts of records on disk, see `open_parts`; None: there are none."""
        wrap_engine()
        self._open_shards = open_shards
        self.shards: ShardKeeper | None = None
        self._decoder = Decoder(runner, self._object_of)
        self._operations = {**OPERATIONS, QUEUE_PART: self._queue_part}
        self.objects: dict[int, Numbered] = {}
        self.num_operations = 0

    def follow(self, message: Coded) -> None:
        """Run the operation in a message. After any exception this rank is out of step with the others."""
        match message:
            case ["run", dropped, number, name, coded, by_name]:
                self._drop(dropped)
                self._run(number, self._operations[name], coded, by_name)
            case ["check", dropped, numbers, digest]:
                self._drop(dropped)
                held = {number: self._object_of(number) for number in cast("list[int]", numbers)}
                if digest_of(held) != digest:
                    raise RuntimeError("this rank and rank 0 do not hold the same objects")
            case ["shards", fingerprint, block, resumes_anywhere]:
                assert self._open_shards is not None, "rank 0 has no disk cache without the others"
                self.shards = self._open_shards(fingerprint, block=block, resumes_anywhere=resumes_anywhere)
            case ["read", number, key]:
                self._kept.read(number, bytes.fromhex(key))
            case ["forget", number]:
                self._kept.forget(number)
            case ["remove", keys]:
                self._kept.remove(map(bytes.fromhex, cast("list[str]", keys)))
            case ["clear", number, root]:
                self._kept.clear(number, None if root is None else bytes.fromhex(root))
            case _:
                raise ValueError(f"rank 0 sent an unknown operation: {str(message)[:80]}")

    def _run(self, number: int, function: Callable[..., Any], coded: list[Coded], by_name: dict[str, Coded]) -> None:
        positional = [self._decoder.decode(value) for value in coded]
        named = {key: self._decoder.decode(value) for key, value in by_name.items()}
        with one_operation():
            result = function(*positional, **named)
        for each in numbered_in(result):
            self.objects[number] = each
            number += 1
        self.num_operations += 1

    def _queue_part(
        self, encoder: RecordEncoder, root: str, parent: str, start: int, tokens: Tokens, *, is_tail: bool
    ) -> None:
        """Queue our part of a record for writing."""
        if self.shards is not None:
            record = DiskRecord(
                root=bytes.fromhex(root),
                parent=bytes.fromhex(parent),
                is_tail=is_tail,
                start=start,
                tokens=tokens,
                about=encoder.about,
                sections=encoder.sections,
            )
            self.shards.put(record)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            if number < 0:
                self._kept.drop(number)
            # Results of an operation that failed on rank 0 never got a number there.
            self.objects.pop(number, None)

    def _object_of(self, number: int) -> Numbered:
        return self._kept.part(number) if number < 0 else self.objects[number]

    @property
    def _kept(self) -> ShardKeeper:
        assert self.shards is not None, "rank 0 has the parts opened first"
        return self.shards
