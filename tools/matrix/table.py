"""COMPATIBILITY.md from the measured rows."""

from collections.abc import Mapping, Sequence

import mlx_lm

from tests.zoo.sizes import Unavailable
from tools.matrix.gaps import ROUNDING, Gap
from tools.matrix.row import Row

_COLUMNS = ("architecture", "caches", "resumes", "B/token", "B/snapshot", "batches", "warm = cold", "chunked = whole")


def render(rows: Sequence[Row], unavailable: Mapping[str, Unavailable], broken: Mapping[str, str]) -> str:
    """The page. `broken`: architectures whose checks raised, and what."""
    lines = [
        "# Compatibility",
        "",
        f"Written by `make matrix` with mlx-lm {mlx_lm.__version__}: every architecture that it ships, as a tiny model",
        "with random float32 weights (`tests/zoo`). Do not edit.",
        "",
        "- *resumes*: at which positions of a stored prompt a later request can go on.",
        "- *B/token*, *B/snapshot*: bytes of the tiny configuration, windows counted as long as they are covered.",
        "- *batches*: whether several sequences may share a forward pass, as measured.",
        "- *warm = cold*: the largest difference in log-probability between a prompt that resumed from the cache and",
        "  the same prompt from nothing: exact repeat, longer, edited, branched at random positions, one token;",
        "  prefilled in chunks of 1, 7, 64 tokens and whole.",
        "- *chunked = whole*: the same without any reuse, between a prompt in chunks and at once.",
        f"- Up to {ROUNDING:g} is rounding.",
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


def _cells(row: Row) -> tuple[str, ...]:
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
