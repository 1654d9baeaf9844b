"""The demo about pictures: what the model says depends on the picture, and reuse changes nothing of it."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import reprise
import reprise.lab.demo.see as see
from reprise.cli.main import app
from reprise.lab.demo import pictures
from reprise.lab.demo.report import all_turns, as_json, summary, table, totals
from reprise.lab.demo.turns import DemoPart
from tests.demo.test_drive import big_turn

MODEL = Path(str(files("reprise.lab.demo") / "seeing"))
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")


@pytest.fixture(scope="module")
def engine() -> Iterator[reprise.Engine]:
    with reprise.Engine(MODEL, settles=False) as made:
        yield made


def said(engine: reprise.Engine, *told: pictures.PictureExchange) -> list[str]:
    """The answers to these messages, one after the other in a chat of their own."""
    chat = engine.chat(pictures.SYSTEM_PROMPT, temperature=0, max_tokens=16)
    shown = [told.words if told.picture is None else [told.words, reprise.Image(told.picture.content)] for told in told]
    return [chat.send(message).text for message in shown]


def test_every_answer_of_the_story_is_right_and_follows_the_picture(engine: reprise.Engine) -> None:
    told = pictures.exchanges(pictures.CHAT)
    assert said(engine, *told) == [each.answer for each in told]
    edited = pictures.exchanges((pictures.EDITED, *pictures.CHAT[1:]))
    assert said(engine, *edited) == [each.answer for each in edited]
    assert edited[-1].answer != told[-1].answer


@pytest.mark.parametrize("colour", pictures.COLOURS)
def test_a_picture_that_it_was_not_trained_on_has_its_colour(engine: reprise.Engine, colour: str) -> None:
    told = [pictures.show("Ben", colour, pictures.paint(colour, seed=20_000)), pictures.ask("Ben", colour)]
    assert said(engine, *told) == ["Seen.", f"Ben's picture is {colour}."]


def test_the_same_line_is_the_same_picture_and_another_line_another() -> None:
    (red, *_), (white, *_) = pictures.exchanges(pictures.CHAT), pictures.exchanges((pictures.EDITED,))
    assert red.picture is not None and white.picture is not None
    assert red.picture.content == pictures.exchanges(pictures.CHAT)[0].picture.content  # type: ignore[union-attr]
    assert red.picture.content != white.picture.content


def test_training_cuts_pictures_as_the_processor_does() -> None:
    from mlx_vlm.utils import load_processor  # noqa: PLC0415 (takes seconds)

    from reprise.core.image_files import pixels_of  # noqa: PLC0415
    from tools.train_demo.train_pictures import patches_of  # noqa: PLC0415

    picture = pictures.paint("red", seed=3)
    processor = load_processor(MODEL, add_detokenizer=False)
    given = processor.image_processor(images=[pixels_of(picture)])
    assert np.allclose(np.array(given["pixel_values"]), patches_of(picture), atol=1e-5)


def test_the_table_shows_the_runs_of_the_tower() -> None:
    turn = replace(big_turn(), num_encoded=1, cold_encoded=7)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table([turn]))
    (row,) = [line.split() for line in captured.get().splitlines() if line.strip().startswith("40")]
    assert row[8:10] == ["1", "7"]
    parts = [DemoPart(title="The chat", turns=(turn,))]
    assert "The tower ran 1 times with reuse, 7 times without." in summary(parts)
    assert as_json(parts)["turns"][0]["cold_encoded"] == 7


def test_without_the_extra_a_sentence_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(see, "has_source", lambda: False)
    ran = CliRunner().invoke(app, ["demo", "--images"])
    assert ran.exit_code != 0
    assert "needs an extra" in ran.output and "vision" in ran.output and "install" in ran.output


@pytest.mark.soak
def test_the_whole_demonstration_about_pictures() -> None:
    parts = see.hold_chat_about_pictures()
    chat, whole = totals(parts[0].turns), totals(all_turns(parts))
    assert (whole.num_different, whole.num_right, whole.num_cold_right) == (0, whole.num_turns, whole.num_turns)
    assert chat.computed == chat.oracle
    num_pictures = sum(line.startswith("show") for line in pictures.CHAT)
    assert sum(turn.num_encoded for turn in parts[0].turns) == num_pictures
    assert sum(turn.cold_encoded for turn in parts[0].turns) > 5 * num_pictures
