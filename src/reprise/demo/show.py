"""The demonstration from start to end: build the model, start both servers, hold the chat, show the numbers."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from reprise.demo.client import ask
from reprise.demo.drive import drive
from reprise.demo.report import summary, table
from reprise.demo.server import server
from reprise.demo.turns import Turn, questions

_FRAME_LINES = 8
"""Lines of a table that are no rows."""


def hold_chat(each: Callable[[list[Turn]], None]) -> list[Turn]:
    """Build the model, run both servers and hold the whole chat; `each` is called after every turn.

    Raises DemoFailed if a server does not start or does not answer as it should.
    """
    # Here, since it imports MLX, which nobody should wait for who only asks for help.
    from reprise.demo.tiny.build import build_model  # noqa: PLC0415
    from reprise.demo.tiny.prompts import LocalTokenizer  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="reprise-demo-") as folder:
        model = Path(folder) / "tiny-qwen3_5"
        build_model(model)
        # Without settling, or the counts would depend on how long the server was idle between two turns.
        with server(model, "--no-settle") as warm, server(model, "--no-settle", "--no-prefix-cache") as cold:
            turns: list[Turn] = []
            for turn in drive(partial(ask, warm), partial(ask, cold), LocalTokenizer(model), questions()):
                turns.append(turn)
                each(turns)
            return turns


def show_chat(console: Console) -> list[Turn]:
    """The same with a live table, and the summary after it."""
    console.print("A tiny hybrid model with random weights, two servers, forty turns: about a minute.")
    with Live(console=console, transient=True, vertical_overflow="crop") as live:
        turns = hold_chat(lambda so_far: live.update(table(so_far, last=max(1, console.height - _FRAME_LINES))))
    console.print(table(turns))
    console.print(summary(turns), highlight=False)
    console.print("Your own model:  reprise serve PATH-OR-HUB-ID", style="bold", highlight=False)
    return turns
