"""Together against alone: sequences that share forward passes, against each of them computed alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from reprise.core.tokens import Tokens, join_tokens
from reprise.engine.states.blueprint import Blueprint
from reprise.engine.states.sequence_batch import SequenceBatch
from tests.zoo.forward import log_probabilities
from tools.matrix.gaps import Gap
from tools.matrix.sequence import answers_of, feed, random_prompt

_PROMPTS = (9, 40, 71)
_TAIL = 40


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Tokens, and the log-probabilities at all of them as computed alone."""

    tokens: Tokens
    answers: mx.array


class _ComparedBatch:
    """Sequences that are computed together; `gap` is how far they were from each alone."""

    def __init__(self, model: nn.Module, rows: SequenceBatch, members: Sequence[_Sequence]) -> None:
        self.model = model
        self.rows = rows
        self.members = list(members)
        self.gap = Gap()

    def step(self, num: int, where: str) -> None:
        """Feed the next `num` tokens of every member at once."""
        pairs = list(zip(self.members, self.rows.lengths, strict=True))
        fed = mx.array([[int(token) for token in member.tokens[at : at + num]] for member, at in pairs])
        answers = log_probabilities(self.rows.forward(self.model, fed))
        mx.eval(answers, self.rows.arrays())
        for row, (member, at) in enumerate(pairs):
            self.gap = self.gap.widened(answers[row], member.answers[at : at + num], where)

    def join(self, rows: SequenceBatch, member: _Sequence) -> None:
        self.rows.join([rows])
        self.members.append(member)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.keep_rows(rows)
        self.members = [self.members[row] for row in rows]


def ragged_decode(model: nn.Module, blueprint: Blueprint) -> Gap:
    """Sequences of different lengths decode together, with one that joins on the way and two that leave."""
    short, middle, long = (_member(model, blueprint, length) for length in _PROMPTS)
    batch = _ComparedBatch(model, _after_prompt(model, blueprint, middle), [middle])
    batch.join(_after_prompt(model, blueprint, short), short)
    _decode(batch, "two rows")
    batch.join(_after_prompt(model, blueprint, long), long)
    _decode(batch, "after a longer one joined")
    batch.keep([2, 1])
    _decode(batch, "after one left")
    batch.keep([1])
    _decode(batch, "the shortest alone again")
    return batch.gap


def even_slices(model: nn.Module, blueprint: Blueprint) -> Gap:
    """Sequences prefill together from the start, in slices of equal length, and then decode."""
    members = [_member(model, blueprint, length) for length in _PROMPTS]
    rows = SequenceBatch(blueprint)
    rows.join([SequenceBatch(blueprint) for _ in members[1:]])
    batch = _ComparedBatch(model, rows, members)
    batch.step(20, "first slice")
    batch.step(9, "second slice")
    _decode(batch, "decode after slices")
    return batch.gap


def ragged_slices(model: nn.Module, blueprint: Blueprint) -> Gap:
    """Sequences that stand at different positions prefill together, in slices of equal length."""
    short, middle, _ = (_member(model, blueprint, length) for length in _PROMPTS)
    batch = _ComparedBatch(model, _after_prompt(model, blueprint, middle), [middle])
    batch.join(_after_prompt(model, blueprint, short), short)
    batch.step(7, "a slice")
    batch.step(17, "a slice longer than the window")
    _decode(batch, "decode after slices")
    return batch.gap


def _member(model: nn.Module, blueprint: Blueprint, length: int) -> _Sequence:
    tokens = join_tokens(random_prompt(length, seed=length), random_prompt(_TAIL, seed=length + 1))
    return _Sequence(tokens, answers_of(model, blueprint, tokens))


def _after_prompt(model: nn.Module, blueprint: Blueprint, member: _Sequence) -> SequenceBatch:
    rows = SequenceBatch(blueprint)
    feed(model, rows, member.tokens[: len(member.tokens) - _TAIL], chunk=None)
    return rows


def _decode(batch: _ComparedBatch, where: str) -> None:
    for _ in range(4):
        batch.step(1, where)
