"""Whether a model's sequences may share passes: by the table, or by a trial of a few tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from reprise.engine.models.load import LoadedModel
from reprise.engine.running.batching import ALONE, batch_distance, reason_to_run_alone
from tests.models.shared import loaded
from tools.matrix.gaps import Gap


def changed(change: Callable[[mx.array], mx.array]) -> LoadedModel:
    """An architecture that nobody knows, whose logits are changed when several sequences share a pass."""
    right = loaded("llama")

    def model(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = right.model(tokens, cache=cache)
        return change(logits) if tokens.shape[0] > 1 else logits

    return replace(right, model=model, architecture="unknown")  # type: ignore[arg-type]


def in_the_second(value: float) -> Callable[[mx.array], mx.array]:
    return lambda logits: mx.where((mx.arange(logits.shape[0]) == 1)[:, None, None], logits * value, logits)


def fails(logits: mx.array) -> mx.array:
    raise ValueError("one sequence, please")


def test_a_batch_that_is_right_is_shared() -> None:
    assert batch_distance(loaded("llama")) < 1e-5
    assert reason_to_run_alone(changed(lambda logits: logits)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_the_second(0.5), "differs from the same sequences alone"),
        (in_the_second(float("nan")), "differs from the same sequences alone"),
        (lambda logits: logits * float("nan"), "differs from the same sequences alone"),
        (fails, "a batch raised ValueError: one sequence, please"),
    ],
)
def test_a_batch_that_is_wrong_is_not(change: Callable[[mx.array], mx.array], reason: str) -> None:
    told = reason_to_run_alone(changed(change))
    assert told is not None
    assert reason in told


def test_a_model_is_tried_once_and_each_for_itself() -> None:
    passes: list[int] = []

    def counted(logits: mx.array) -> mx.array:
        passes.append(logits.shape[0])
        return logits

    model = changed(counted)
    assert reason_to_run_alone(model) is None
    num = len(passes)
    assert num > 0
    assert reason_to_run_alone(model) is None
    assert len(passes) == num
    assert reason_to_run_alone(changed(in_the_second(0.5))) is not None, "of the same fingerprint"


@pytest.mark.parametrize("architecture", ALONE)
def test_what_was_measured_is_not_tried_again(architecture: str) -> None:
    known = replace(changed(fails), architecture=architecture)
    assert reason_to_run_alone(known) == ALONE[architecture]


def test_what_is_no_number_is_never_forgotten() -> None:
    nothing, some = mx.array([float("nan")]), mx.array([1.0])
    gap = Gap().widened(nothing, some, "first").widened(some, some, "second")
    assert gap.where == "first"
    assert not gap.is_rounding
