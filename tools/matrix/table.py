"""COMPATIBILITY.md from the measured rows."""

from collections.abc import Mapping, Sequence

import mlx_lm

from tests.zoo.sizes import Unavailable
from tools.matrix.gaps import ROUNDING, Gap
from tools.matrix.row import ArchitectureRow

_COLUMNS = ("architecture", "caches", "resumes", "B/token", "B/snapshot", "batches", "warm = cold", "chunked = whole")


def render(rows: Sequence[ArchitectureRow], unavailable: Mapping[str, Unavailable], broken: Mapping[str, str]) -> str:
    """The page. `broken`: architectures whose checks raised, and what."""
    lines = [
        "# Compatibility",
        "",
        f"Written by `make matrix` with mlx-lm {mlx_lm.__version__}: all of its architectures, each as a tiny model",
        "with random float32 weights (`tests/zoo`). Do not edit.",
        "",
        "- *resumes*: the positions of a stored prompt at which a later request can resume.",
        "- *B/token*, *B/snapshot*: bytes for the tiny configuration; windows count while they are covered.",
        "- *batches*: whether several sequences can share a forward pass, as measured.",
        "- *warm = cold*: the largest difference in log-probability between a prompt resumed from the cache and",
        "  the same prompt computed cold: exact repeat, longer, edited, branched at random positions, one token;",
        "  prefilled in chunks of 1, 7, 64 tokens and whole.",
        "- *chunked = whole*: the same difference without reuse, between a prompt in chunks and at once.",
        f"- Differences up to {ROUNDING:g} are rounding.",
        "",
        _line(_COLUMNS),
        _line(["---"] * len(_COLUMNS)),
        *(_line(_cells(row)) for row in rows),
        "",
        f"{len(rows)} architectures and variants measured, {len(unavailable)} not available here.",
    ]
    lines += _section("Notes", [(row.name, note) for row in rows for note in row.notes])
    lines += _section("Faults", [(row.name, fault) for row in rows for fault in row.faults] + list(broken.items()))
    lines += _section("Not run here", [(name, entry.reason + ".") for name, entry in unavailable.items()])
    return "\n".join(lines) + "\n"


def _cells(row: ArchitectureRow) -> tuple[str, ...]:
    snapshot = f"{row.bytes_per_snapshot:,}" if row.bytes_per_snapshot > 0 else "none"
    return (
        row.name,
        row.caches,
        row.resumes,
        f"{row.bytes_per_token:,}",
        snapshot,
        row.batched,
        _number(row.warm),
        _number(row.chunked),
    )


def _number(gap: Gap) -> str:
    return "exact" if gap.difference == 0 else f"{gap.difference:.0e}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _section(title: str, entries: Sequence[tuple[str, str]]) -> list[str]:
    if not entries:
        return []
    return ["", f"## {title}", "", *(f"- **{name}**: {text}" for name, text in entries)]
