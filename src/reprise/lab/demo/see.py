"""The demo with pictures: two servers of a model that sees, one chat, a restart, and another first picture."""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from reprise.core.installation import mend_line
from reprise.core.tokens import Tokens, as_tokens
from reprise.engine.models.vision import has_source
from reprise.lab.demo import pictures
from reprise.lab.demo.client import DemoFailed, ask, two_servers
from reprise.lab.demo.drive import Drive
from reprise.lab.demo.prompts import LocalTokenizer
from reprise.lab.demo.report import parts_table, summary, table
from reprise.lab.demo.turns import DemoPart, History

OPENING: History = ({"role": "system", "content": pictures.SYSTEM_PROMPT},)
_PLACEHOLDER = "<|image_pad|>"


class PictureTokenizer:
    """Counts tokens apart from the servers: ids below zero stand for a picture, derived from its file."""

    def __init__(self, directory: Path) -> None:
        self._words = LocalTokenizer(directory)
        (self._placeholder,) = self._words.answer([_PLACEHOLDER]).tolist()

    def prompt(self, history: History) -> Tokens:
        """The tokens of the chat, ready for the answer."""
        shown = iter([_url_of(part) for message in history for part in _parts(message) if part["type"] != "text"])
        plain = [{**message, "content": _as_templates_have_it(message["content"])} for message in history]
        tokens: list[int] = []
        for token in self._words.prompt(plain).tolist():
            tokens += _ids_of(next(shown)) if token == self._placeholder else [token]
        return as_tokens(tokens)

    def answer(self, texts: Sequence[str]) -> Tokens:
        """The ids of tokens given by their texts."""
        return self._words.answer(texts)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return cast(list[Mapping[str, Any]], content) if isinstance(content, list) else ()


def _url_of(part: Mapping[str, Any]) -> str:
    return part["image_url"]["url"]


def _as_templates_have_it(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


def _ids_of(url: str) -> list[int]:
    return (-1 - np.random.default_rng(zlib.crc32(url.encode())).integers(0, 2**31 - 1, pictures.PLACEHOLDERS)).tolist()


def hold_chat_about_pictures() -> tuple[DemoPart, ...]:
    """Run both servers and hold the chat, restarted in the middle, and again with another first picture.

    Raises DemoFailed if the extra is missing or a server does not answer as it should, ServerFailed.
    """
    if not has_source():
        raise DemoFailed(f"A model that sees needs an extra: {mend_line('vision')}")
    with two_servers("seeing") as (model, warm, cold):
        drive = Drive(
            warm=lambda history: ask(warm.client, history, tools=()),
            cold=partial(ask, cold, tools=()),
            tokenizer=PictureTokenizer(model),
        )
        told, after = pictures.exchanges(pictures.CHAT), pictures.RESTART_AFTER
        begun = tuple(drive.hold(told[:after], OPENING))
        warm.restart()
        chat = begun + tuple(drive.hold(told[after:], begun[-1].history, first=after + 1))
        edited = pictures.exchanges((pictures.EDITED, *pictures.CHAT[1:]))
        shown = {"role": "user", "content": edited[0].content}
        history = (*OPENING, shown, *chat[-2].history[len(OPENING) + 1 :])
        other = tuple(drive.hold(edited[-1:], history, first=len(chat)))
    return (
        DemoPart(title="The chat", turns=chat),
        DemoPart(title="The first picture exchanged: the last question again", turns=other),
    )


def show_chat_about_pictures(console: Console) -> tuple[DemoPart, ...]:
    """The same on the screen: the turns, then the table and the numbers."""
    console.print("A tiny model that tells colours apart, two servers, a chat about pictures.", highlight=False)
    parts = hold_chat_about_pictures()
    console.print(parts_table(parts))
    console.print(table(parts[0].turns))
    console.print(summary(parts), highlight=False)
    console.print(
        "\n[bold]Your own model[/bold]   reprise serve PATH-OR-HUB-ID, and see docs/images.md", highlight=False
    )
    return parts
