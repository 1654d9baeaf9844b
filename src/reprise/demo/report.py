"""The numbers of the demonstration, for a person and for a program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from reprise.demo.turns import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Prompt tokens over all turns."""

    prompt_tokens: int
    computed: int
    cold_computed: int
    oracle: int
    typed: int
    num_different: int
    """Turns in which the two servers gave different tokens."""

    @property
    def hit_share(self) -> float:
        return 1 - self.computed / self.prompt_tokens


def totals(turns: Sequence[Turn]) -> Totals:
    """The sums over the turns, of which there is at least one."""
    return Totals(
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        computed=sum(turn.computed for turn in turns),
        cold_computed=sum(turn.cold_computed for turn in turns),
        oracle=sum(turn.oracle for turn in turns),
        typed=sum(turn.typed for turn in turns),
        num_different=sum(not turn.is_same_answer for turn in turns),
    )


def as_json(turns: Sequence[Turn]) -> dict[str, Any]:
    """`turns` and `totals`, as `reprise demo --json` prints them."""
    keys = ("turn", "prompt_tokens", "reused", "computed", "oracle", "ttft_s", "cold_ttft_s")
    sums = totals(turns)
    return {
        "turns": [{key: getattr(turn, key) for key in keys} for turn in turns],
        "totals": {key: getattr(sums, key) for key in ("prompt_tokens", "computed", "cold_computed", "oracle")},
    }


# Two lines each, so that the table fits 80 columns.
_HEADS = (
    "\nturn",
    "\nprompt",
    "\nreused",
    "\ncomputed",
    "\nhit %",
    "\nms",
    "no cache\ncomputed",
    "no cache\nms",
    "\nwhy computed",
)


def table(turns: Sequence[Turn], *, last: int | None = None) -> Table:
    """The turns as a table; with `last`, only so many of the latest."""
    title = "One chat, two servers: tokens, ms to the first token"
    shown = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for head in _HEADS:
        shown.add_column(head, justify="left" if head == _HEADS[-1] else "right", no_wrap=True)
    for turn in turns if last is None else turns[-last:]:
        shown.add_row(
            str(turn.turn),
            f"{turn.prompt_tokens:,}",
            f"{turn.reused:,}",
            f"{turn.computed:,}",
            f"{100 * turn.reused / turn.prompt_tokens:.1f}",
            f"{1000 * turn.ttft_s:,.0f}",
            f"{turn.cold_computed:,}",
            f"{1000 * turn.cold_ttft_s:,.0f}",
            turn.why if turn.is_same_answer else "ANSWERS DIFFER",
        )
    return shown


def summary(turns: Sequence[Turn]) -> str:
    """What the numbers say, in a few lines."""
    sums = totals(turns)
    waited, waited_cold = (sum(getattr(turn, name) for turn in turns) for name in ("ttft_s", "cold_ttft_s"))
    same = "gave the same tokens in every turn" if sums.num_different == 0 else f"differ in {sums.num_different} turns"
    return (
        f"Of {sums.prompt_tokens:,} prompt tokens, {sums.computed:,} were computed with reuse "
        f"({100 * sums.hit_share:.1f} % skipped), {sums.cold_computed:,} without.\n"
        f"An oracle that forgets nothing would compute {sums.oracle:,}: "
        f"this is {sums.computed / sums.oracle:.3f} times that.\n"
        f"Time to first token, all turns together: {waited:.1f} s with reuse, {waited_cold:.1f} s without.\n"
        f"The two servers {same}.\n"
        f"Settling was off, so that these counts are exact; it would read all but {sums.typed:,} of the tokens "
        "while the server is idle."
    )
