"""One row of the table: everything that is measured of one architecture."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mlx import nn

from reprise.cli.inspection import where_it_resumes
from reprise.engine.running.batching import ALONE
from reprise.engine.states.blueprint import Blueprint, blueprint_of
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from tests.zoo.caches import build_any, cache_name, make_caches
from tools.matrix import batches, chunking
from tools.matrix.gaps import Gap
from tools.matrix.sequence import feed, random_prompt
from tools.matrix.warm import CHUNKS, warm_against_cold


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureRow:
    """What one architecture showed. `notes` are sentences; `faults` are those of our own, which must be none."""

    name: str
    caches: str
    resumes: str
    bytes_per_token: int
    bytes_per_snapshot: int
    batched: str
    warm: Gap
    chunked: Gap
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def measure(name: str) -> ArchitectureRow:
    """Build the tiny model and run all checks on it."""
    model = build_any(name)
    blueprint = blueprint_of(model)
    notes: list[str] = []
    faults: list[str] = []

    theirs = chunking.theirs(model, lambda: make_caches(model))
    ours = chunking.ours(model, blueprint)
    decode = chunking.ours_against_theirs(model, blueprint, lambda: make_caches(model))
    if not decode.is_rounding:
        faults.append(f"decodes otherwise than on mlx-lm's own caches: {decode.difference:.1e}")
    reason = chunking.CUT_DEPENDENT.get(name)
    if reason is not None:
        # Cold answers differ among each other there: what can agree is what is cut alike.
        notes.append(
            f"Its answer depends on how a prompt is cut (by {ours.difference:.1e}): {reason}. "
            "Warm = cold is measured one token at a time."
        )
    elif not ours.is_rounding:
        faults.append(f"differs by {ours.difference:.1e} when its prompt is cut: {ours.where}")
    elif not theirs.is_rounding:
        notes.append(
            f"With mlx-lm's own caches its answer depends on how a prompt is cut (by {theirs.difference:.1e}); "
            "here it does not, and equals mlx-lm's decode."
        )
    warm = warm_against_cold(model, blueprint, chunks=CHUNKS if reason is None else (1,))
    gap = warm.gap
    faults.extend(warm.missed)
    if not gap.is_rounding:
        faults.append(f"warm differs from cold by {gap.difference:.1e}: {gap.where}")
    wrong = _wrong_batches(model, blueprint)
    if wrong and name not in ALONE:
        faults.append(f"may share passes, and must not: {wrong}")
    elif wrong:
        notes.append(f"Runs alone: {wrong}.")
    tokens_nbytes, snapshot_nbytes = _sizes(model, blueprint)
    return ArchitectureRow(
        name=name,
        caches=_caches(model),
        resumes=where_it_resumes(blueprint.layout),
        bytes_per_token=tokens_nbytes,
        bytes_per_snapshot=snapshot_nbytes,
        batched="together" if blueprint.joins and not wrong else "alone",
        warm=gap,
        chunked=ours,
        notes=tuple(notes),
        faults=tuple(faults),
    )


def _caches(model: nn.Module) -> str:
    counted = Counter(cache_name(cache) for cache in make_caches(model))
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in sorted(counted.items()))


def _wrong_batches(model: nn.Module, blueprint: Blueprint) -> str:
    """What goes wrong when several sequences share a pass, as measured; nothing where layers hold one sequence."""
    if not blueprint.joins:
        return ""
    checks: dict[str, Callable[[nn.Module, Blueprint], Gap]] = {
        "decode of different lengths": batches.ragged_decode,
        "prefill of equal slices from the start": batches.even_slices,
        "prefill of equal slices at different positions": batches.ragged_slices,
    }
    problems = {name: _problem(check, model, blueprint) for name, check in checks.items()}
    return "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem is not None)


def _problem(check: Callable[[nn.Module, Blueprint], Gap], model: nn.Module, blueprint: Blueprint) -> str | None:
    try:
        gap = check(model, blueprint)
    except (TypeError, ValueError, IndexError) as error:
        # What a model's own code raises for rows of different lengths.
        return f"raises ({str(error).splitlines()[0].rstrip('.')})"
    return None if gap.is_rounding else f"is wrong by {gap.difference:.1e} ({gap.where})"


def _sizes(model: nn.Module, blueprint: Blueprint) -> tuple[int, int]:
    """Bytes of entries that one token stores in all layers, and bytes of a snapshot (0: none is needed)."""
    rows = SequenceBatch(blueprint)
    feed(model, rows, random_prompt(40, seed=5), chunk=None)
    source = SequenceSource(rows, 0)
    tokens_nbytes = sum(source.segment_nbytes(kind, 1) for kind in blueprint.layout.kinds)
    return tokens_nbytes, source.snapshot_nbytes() if blueprint.layout.has_snapshots else 0
