"""The whole demo: two servers, forty turns, a restart, a branch, an edit, two chats at once, and the numbers."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reprise.lab.demo import story
from reprise.lab.demo.client import Hear, ask, two_servers
from reprise.lab.demo.drive import Drive
from reprise.lab.demo.facts import LOOK_UP_TOOL, FactExchange
from reprise.lab.demo.oracle import Oracle
from reprise.lab.demo.plots import plot_text, save_plot
from reprise.lab.demo.report import narrow_table, parts_table, summary, table
from reprise.lab.demo.turns import OPENING, ClientAnswer, DemoPart, History, Turn

Count = Callable[[Turn], None]

_WIDE = 110
"""Columns that the whole table takes; a narrower terminal gets the figures that matter most."""


def hold_chats(hear: Hear = lambda _kind, _text: None, count: Count = lambda _turn: None) -> tuple[DemoPart, ...]:
    """Run both servers and hold every part of the demonstration.

    `hear` gets the words of the warm server's chat as they stream, and what happens to it; `count` gets every turn.

    Raises ServerFailed if a server does not start, DemoFailed if it does not answer as it should.
    """
    with two_servers("model") as (model, warm, cold):
        # Here, since it imports MLX, which nobody should wait for who only asks for help.
        from reprise.lab.demo.prompts import LocalTokenizer  # noqa: PLC0415

        def ask_warm(history: History) -> ClientAnswer:
            hear(history[-1]["role"], history[-1]["content"])
            return ask(warm.client, history, hear=hear)

        drive = Drive(warm=ask_warm, cold=partial(ask, cold), tokenizer=LocalTokenizer(model, tools=[LOOK_UP_TOOL]))

        def restart() -> None:
            hear("event", "the server is stopped and started again")
            warm.restart()

        chat = _hold_chat(drive, restart, count)
        forks = _hold_forks(drive, chat, hear, count)
        quiet = replace(drive, warm=partial(ask, warm.client), oracle=Oracle())
        return (DemoPart(title="The chat", turns=chat), *forks, _hold_two(quiet))


def _hold_chat(drive: Drive, restart: Callable[[], None], count: Count) -> tuple[Turn, ...]:
    """The forty turns, with a restart in the middle."""
    told = story.exchanges(story.CHAT)
    begun = _hold(drive, told[: story.RESTART_AFTER], OPENING, count)
    restart()
    rest = told[story.RESTART_AFTER :]
    return begun + _hold(drive, rest, begun[-1].history, count, first=story.RESTART_AFTER + 1)


def _hold_forks(drive: Drive, chat: tuple[Turn, ...], hear: Hear, count: Count) -> Iterator[DemoPart]:
    """Other ways on from places in the chat."""
    start = story.BRANCH_AT
    hear("event", f"a branch from turn {start}")
    branch = story.exchanges((*story.CHAT[:start], *story.BRANCH))[start:]
    turns = _hold(drive, branch, chat[start - 1].history, count, first=start + 1)
    yield DemoPart(title=f"A branch from turn {start}", turns=turns)

    hear("event", "the chat goes on")
    after = story.exchanges((*story.CHAT, *story.AFTER_BRANCH))[len(chat) :]
    turns = _hold(drive, after, chat[-1].history, count, first=len(chat) + 1)
    yield DemoPart(title="The chat goes on: it knows nothing of the branch", turns=turns)

    hear("event", "the first message is edited")
    edited = story.exchanges((story.EDITED, *story.CHAT[1:]))
    history = _with_first_exchange(chat[-2].history, edited[0])
    turns = _hold(drive, edited[-1:], history, count, first=len(chat))
    yield DemoPart(title="The first message edited: the last question again", turns=turns)


def _hold_two(drive: Drive) -> DemoPart:
    """Two chats at the same time."""
    with ThreadPoolExecutor(len(story.AT_ONCE)) as pool:
        chats = [pool.submit(_hold, drive, story.exchanges(lines), OPENING) for lines in story.AT_ONCE]
        turns = tuple(turn for chat in chats for turn in chat.result())
        return DemoPart(title="Two chats at once, about the same people", turns=turns)


def _hold(
    drive: Drive, told: Sequence[FactExchange], history: History, count: Count = lambda _turn: None, *, first: int = 1
) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for turn in drive.hold(told, history, first=first):
        turns.append(turn)
        count(turn)
    return tuple(turns)


def _with_first_exchange(history: History, exchange: FactExchange) -> History:
    """The same chat, had its first exchange been this one."""
    start = len(OPENING)
    said = {"role": "user", "content": exchange.user}
    answered = {"role": "assistant", "content": exchange.answer}
    return (*history[:start], said, answered, *history[start + 2 :])


class _DemoScreen:
    """The chat as it streams, beside the latest rows of the table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, vertical_overflow="crop", refresh_per_second=12)
        self._said: list[Text] = []
        self._kind = ""
        self._turns: list[Turn] = []

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def hear(self, kind: str, text: str) -> None:
        """Words of the user, of the tool or of the model, as they come."""
        if self._kind == "reasoning" != kind:
            self._said[-1].append(")")
        if kind != self._kind or kind in ("user", "tool", "event"):
            self._said.append(Text(_SPEAKERS[kind], style=_STYLES[kind]))
        self._kind = kind
        self._said[-1].append(text.replace("\n", " "))
        self._draw()

    def count(self, turn: Turn) -> None:
        self._turns.append(turn)
        self._draw()

    def _draw(self) -> None:
        lines = max(4, self._console.height - 8)
        side_by_side = Table.grid(expand=True, padding=(0, 2))
        side_by_side.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        side_by_side.add_column()
        said = Text("\n").join(self._said[-lines:])
        side_by_side.add_row(said, narrow_table(self._turns[-lines:]))
        self._live.update(side_by_side)


_SPEAKERS = {
    "user": "user: ",
    "reasoning": "  (",
    "content": "      ",
    "call": "  calls ",
    "tool": "tool: ",
    "event": "--- ",
}
_STYLES = {
    "user": "bold",
    "reasoning": "dim italic",
    "content": "green",
    "call": "cyan",
    "tool": "cyan",
    "event": "yellow",
}


def show_chats(console: Console) -> tuple[DemoPart, ...]:
    """The same on the screen: the chat beside the table, then the numbers, the plot and what to do next."""
    console.print("A tiny hybrid thinking model, two servers, forty turns: about a minute.", highlight=False)
    with _DemoScreen(console) as screen:
        parts = hold_chats(screen.hear, screen.count)
    chat = parts[0].turns
    console.print(table(chat) if console.width >= _WIDE else narrow_table(chat))
    console.print(parts_table(parts[1:]))
    console.print(summary(parts), highlight=False)
    console.print(plot_text(chat), highlight=False)
    console.print(save_plot(chat, Path()), highlight=False)
    console.print(_NEXT.format(model=_model_path()), highlight=False)
    return parts


def _model_path() -> str:
    """The directory of the demo's model, as short as it can be typed here."""
    path = Path(str(files("reprise.lab.demo") / "model"))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


_NEXT = """
[bold]Your own model[/bold]   reprise serve PATH-OR-HUB-ID
[bold]This one[/bold]         reprise serve {model}
[bold]What it can keep[/bold] reprise inspect PATH-OR-HUB-ID
[bold]Why it computed[/bold]  reprise explain ID, with the id of an answer"""
