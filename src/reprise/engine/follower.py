"""A rank other than 0: runs the operations of rank 0, in order, on its own shard. It takes no decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from reprise.engine.leader import digest_of
from reprise.engine.operation_codec import Coded, Decoder, Numbered, numbered_in
from reprise.engine.operations import OPERATIONS, one_operation
from reprise.engine.runner import Runner


class FollowingRank:
    """The objects of one rank, by the numbers that rank 0 assigned."""

    def __init__(self, runner: Runner) -> None:
        self._decoder = Decoder(runner, self._object_of)
        self.objects: dict[int, Numbered] = {}
        self.num_operations = 0

    def follow(self, message: Coded) -> None:
        """Run the operation in a message. After any exception this rank is out of step with the others."""
        match message:
            case ["run", dropped, number, name, coded, by_name]:
                self._drop(dropped)
                self._run(number, OPERATIONS[name], coded, by_name)
            case ["check", dropped, numbers, digest]:
                self._drop(dropped)
                held = {number: self._object_of(number) for number in cast("list[int]", numbers)}
                if digest_of(held) != digest:
                    raise RuntimeError("this rank and rank 0 do not hold the same objects")
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

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            # Results of an operation that failed on rank 0 never got a number there.
            self.objects.pop(number, None)

    def _object_of(self, number: int) -> Numbered:
        return self.objects[number]
