"""COMPATIBILITY.md from the measured rows."""

from collections.abc import Mapping, Sequence

import mlx_lm

from reprise.engine.models.vision import TEXT_ALONE
from tests.zoo.sizes import Unavailable
from tools.matrix.gaps import ROUNDING, Gap
from tools.matrix.row import ArchitectureRow
from tools.matrix.seeing import SeeingRow

_COLUMNS = ("architecture", "caches", "resumes", "B/token", "B/snapshot", "batches", "warm = cold", "chunked = whole")


_SEEING = ("family", "caches", "resumes", "positions", "both ways", "warm = cold", "batch = alone", "chunked = whole")


def render(
    rows: Sequence[ArchitectureRow],
    unavailable: Mapping[str, Unavailable],
    broken: Mapping[str, str],
    seeing: Sequence[SeeingRow] = (),
) -> str:
    """The page. `broken`: architectures whose checks raised, and what. `seeing`: families of models that see."""
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
    faults = [(row.name, fault) for row in (*rows, *seeing) for fault in row.faults]
    lines += _section("Faults", faults + list(broken.items()))
    lines += _section("Not run here", [(name, entry.reason + ".") for name, entry in unavailable.items()])
    return "\n".join([*lines, *(_seeing(seeing) if seeing else ())]) + "\n"


def _seeing(rows: Sequence[SeeingRow]) -> list[str]:
    """The part about models that see."""
    return [
        "",
        "## Models that see",
        "",
        f"With {rows[0].source}: families whose images enter as rows of embeddings, each as a tiny model with",
        "tower, processor and template (`tests/vision`).",
        "",
        "- *positions*: whether a model counts them, or every pass tells it where its tokens stand.",
        "- *both ways*: the layers in which an image sees all of itself, as in transformers.",
        "- *warm = cold*: seven walks (next turn, other question, other image, second image, the turn after it,",
        "  images swapped, cut in the middle of an image) behind what the cache has, against cold runs.",
        "- *batch = alone*: three rows with other images, of other lengths, decoded together.",
        "- *chunked = whole*: prompts with two images in chunks of 1, 7 and 64 tokens.",
        "",
        _line(_SEEING),
        _line(["---"] * len(_SEEING)),
        *(
            _line(
                (
                    row.name,
                    row.caches,
                    row.resumes,
                    row.positions,
                    row.both_ways,
                    _number(row.warm),
                    "runs alone" if row.batched is None else _number(row.batched),
                    _number(row.chunked),
                )
            )
            for row in rows
        ),
        "",
        "Text alone:",
        "",
        *(f"- **{name}**: {reason}." for name, reason in TEXT_ALONE.items()),
    ]


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
