"""The numbers of the demonstration, for a person and for a program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from reprise.lab.demo.turns import DemoPart, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Prompt tokens over all turns."""

    prompt_tokens: int
    computed: int
    cold_computed: int
    oracle: int
    typed: int
    num_turns: int
    num_right: int
    num_cold_right: int
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
        num_turns=len(turns),
        num_right=sum(turn.is_right for turn in turns),
        num_cold_right=sum(turn.is_cold_right for turn in turns),
        num_different=sum(not turn.is_same_answer for turn in turns),
    )


def all_turns(parts: Sequence[DemoPart]) -> list[Turn]:
    """The turns of all parts, in their order."""
    return [turn for part in parts for turn in part.turns]


def as_json(parts: Sequence[DemoPart]) -> dict[str, Any]:
    """As `reprise demo --json` prints it: `turns` and `totals` of the chat, `parts` with the rest."""
    chat, *rest = parts
    return _part_json(chat) | {"parts": [{"title": part.title, **_part_json(part)} for part in rest]}


def _part_json(part: DemoPart) -> dict[str, Any]:
    keys = ["turn", "prompt_tokens", "reused", "computed", "oracle", "ttft_s", "cold_ttft_s", "answer", "is_right"]
    if has_images(part.turns):
        keys += ["num_encoded", "cold_encoded"]
    sums = totals(part.turns)
    names = ("prompt_tokens", "computed", "cold_computed", "oracle", "num_right", "num_cold_right", "num_different")
    return {
        "turns": [{key: getattr(turn, key) for key in keys} for turn in part.turns],
        "totals": {name: getattr(sums, name) for name in names},
    }


def has_images(turns: Sequence[Turn]) -> bool:
    """Whether the model's tower ran, with reuse or without."""
    return any(turn.num_encoded + turn.cold_encoded > 0 for turn in turns)


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


def table(turns: Sequence[Turn]) -> Table:
    """The turns as a table."""
    title = "One chat, two servers: tokens, ms to the first token"
    shown = Table(title=title, box=SIMPLE_HEAD, padding=0)
    sees = has_images(turns)
    for head in (*_HEADS[:-1], *(("tower\nruns", "no cache\nruns") if sees else ()), _HEADS[-1]):
        shown.add_column(head, justify="left" if head == _HEADS[-1] else "right", no_wrap=True)
    for turn in turns:
        shown.add_row(
            str(turn.turn),
            f"{turn.prompt_tokens:,}",
            f"{turn.reused:,}",
            f"{turn.computed:,}",
            f"{100 * turn.reused / turn.prompt_tokens:.1f}",
            f"{1000 * turn.ttft_s:,.0f}",
            f"{turn.cold_computed:,}",
            f"{1000 * turn.cold_ttft_s:,.0f}",
            *((str(turn.num_encoded), str(turn.cold_encoded)) if sees else ()),
            _verdict(turn) or turn.why,
        )
    return shown


def narrow_table(turns: Sequence[Turn]) -> Table:
    """What fits beside the chat."""
    shown = Table(box=SIMPLE_HEAD, padding=0)
    for head in ("\nturn", "\ncomputed", "no cache\ncomputed", "\nanswer"):
        shown.add_column(head, justify="right", no_wrap=True)
    for turn in turns:
        shown.add_row(str(turn.turn), f"{turn.computed:,}", f"{turn.cold_computed:,}", _verdict(turn) or "right")
    return shown


def parts_table(parts: Sequence[DemoPart]) -> Table:
    """The user's message and the answer, part by part."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("user", "answer", "computed", "no cache"):
        shown.add_column(head, justify="left" if head in ("user", "answer") else "right", overflow="ellipsis")
    for part in parts:
        shown.add_row(f"[yellow]{part.title}[/yellow]")
        for turn in part.turns:
            answer = f"{turn.answer} {_verdict(turn)}".rstrip()
            shown.add_row(turn.exchange.user, answer, f"{turn.computed:,}", f"{turn.cold_computed:,}")
    return shown


def _verdict(turn: Turn) -> str:
    """What is wrong with the answer; empty if nothing is."""
    if not turn.is_same_answer:
        return "ANSWERS DIFFER"
    return "" if turn.is_right else "wrong"


_ENCODED = ("num_encoded", "cold_encoded")


def summary(parts: Sequence[DemoPart]) -> str:
    """What the numbers say, in a few lines."""
    sums, whole = totals(parts[0].turns), totals(all_turns(parts))
    waited, waited_cold = (sum(getattr(turn, name) for turn in parts[0].turns) for name in ("ttft_s", "cold_ttft_s"))
    same = (
        "gave the same tokens in every turn" if whole.num_different == 0 else f"differ in {whole.num_different} turns"
    )
    encoded, cold_encoded = (sum(getattr(turn, name) for turn in parts[0].turns) for name in _ENCODED)
    seen = (
        f"The tower ran {encoded} times with reuse, {cold_encoded} times without.\n" if encoded + cold_encoded else ""
    )
    return (
        f"Right answers: {whole.num_right} of {whole.num_turns} with reuse, {whole.num_cold_right} without. "
        f"The two servers {same}.\n"
        f"Of the chat's {sums.prompt_tokens:,} prompt tokens, {sums.computed:,} were computed with reuse "
        f"({100 * sums.hit_share:.1f} % skipped), {sums.cold_computed:,} without.\n{seen}"
        f"An oracle that forgets nothing would compute {sums.oracle:,}: "
        f"{sums.computed / sums.oracle:.3f} times as many were computed.\n"
        f"Time to first token, all turns of the chat: {waited:.1f} s with reuse, {waited_cold:.1f} s without.\n"
        f"Settling was off, so that these counts are exact; it would read all but {sums.typed:,} of the tokens "
        "while the server is idle."
    )
