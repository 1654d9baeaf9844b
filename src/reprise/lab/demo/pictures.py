"""Chats about pictures, with the right answers: whose picture has which colour.

The demo's model that sees is trained on such chats (`tools/train_demo/train_pictures.py`) and judged by others.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reprise.core.images import ImageFile
from reprise.engine.models.vision import image_of_pixels

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 50, 180),
    "orange": (240, 140, 30),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
SIDE = 56
"""Pixels of a picture in each direction."""
PLACEHOLDERS = 4
"""Tokens of the model that stand for a picture."""
SYSTEM_PROMPT = "You look at pictures and remember their colours."


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureExchange:
    """One message of the user, perhaps with a picture, and what the model should answer."""

    words: str
    answer: str
    colour: str = ""
    picture: ImageFile | None = None
    name: str | None = None
    """The tool is called for nobody."""
    result: str | None = None

    @property
    def user(self) -> str:
        """The message as a person is told of it."""
        return self.words if self.picture is None else f"{self.words} [a {self.colour} picture]"

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The message as chat completions take it: the words, and the picture behind them."""
        if self.picture is None:
            return self.words
        url = f"data:image/png;base64,{base64.b64encode(self.picture.content).decode()}"
        return [{"type": "text", "text": self.words}, {"type": "image_url", "image_url": {"url": url}}]


def paint(colour: str, *, seed: int) -> ImageFile:
    """A picture of a disc of this colour on gray, as a PNG file; the same bytes for the same seed."""
    random = np.random.default_rng(seed)
    row, column = np.mgrid[:SIDE, :SIDE]
    middle, radius = random.uniform(0.4 * SIDE, 0.6 * SIDE, 2), random.uniform(0.25 * SIDE, 0.4 * SIDE)
    is_disc = np.hypot(row - middle[0], column - middle[1]) < radius
    painted = np.where(is_disc[..., None], COLOURS[colour], 128)
    noisy = painted + random.normal(0, 8, (SIDE, SIDE, 3))
    return image_of_pixels(noisy.clip(0, 255).astype(np.uint8).tobytes(), SIDE, SIDE)


def show(name: str, colour: str, picture: ImageFile) -> PictureExchange:
    """The user shows somebody's picture. The answer does not say what is on it: whoever asks later has to look."""
    return PictureExchange(words=f"{name}:", answer="Seen.", colour=colour, picture=picture)


def ask(name: str, colour: str) -> PictureExchange:
    """The user asks for the colour of a picture that was shown."""
    return PictureExchange(words=f"What colour is {name}'s picture?", answer=f"{name}'s picture is {colour}.")


CHAT: Sequence[str] = (
    "show Anna red",
    "show Ben blue",
    "ask Ben",
    "show Clara yellow",
    "ask Clara",
    "show David green",
    "ask Ben",
    "show Emma purple",
    "ask David",
    "show Felix black",
    "ask Emma",
    "ask Felix",
    "ask Clara",
    "ask Anna",
)
"""The last question is about the first picture, of which nobody has said what is on it."""
RESTART_AFTER = 8
EDITED = "show Anna white"
"""Instead of the first message; the last question then has another answer."""


_STORY = 10_000
"""From this seed on pictures are the story's: training uses others."""


def exchanges(lines: Sequence[str]) -> tuple[PictureExchange, ...]:
    """The messages for these lines of a story. The same line is the same picture, byte by byte."""
    told: list[PictureExchange] = []
    colours: dict[str, str] = {}
    for line in lines:
        match line.split():
            case ["show", name, colour]:
                colours[name] = colour
                seed = _STORY + len(COLOURS) * NAMES.index(name) + list(COLOURS).index(colour)
                told.append(show(name, colour, paint(colour, seed=seed)))
            case ["ask", name]:
                told.append(ask(name, colours[name]))
            case _:
                raise ValueError(f"a story has no line like {line!r}")
    return tuple(told)
