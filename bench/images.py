"""A chat of twenty turns with six images, one of them twice, on a tiny model that sees: what is computed and encoded.

The oracle remembers everything: a turn costs it what the turn adds to the prompt and answer before. Counts are exact.
Exits with 1 unless computed / oracle is 1.00 and the tower ran once for each distinct image. With `--family`, for
another family of `tests/vision/families.py`; with `--beside`, the same chat with mlx-vlm's own server, too, with its
prefix cache on. With `--text`, instead of that: how long text alone takes on a model that is loaded to see, as a
multiple of what it takes on the same model from mlx-lm, in rounds of both by turns.
"""

import argparse
import base64
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from reprise.engine.models.vision import image_of_pixels
from reprise.lab.bench.server_process import ServerProcess, free_port, server

_TURNS = 20
_NUM = 12
_NUM_DECODED = 200
_IMAGES = {0: 1, 3: 2, 4: 3, 9: 1, 12: 4, 17: 5}
"""Turn → the seed of its image; one comes twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTurn:
    prompt: int
    cached: int
    generated: int

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


def picture(seed: int, side: int = 128) -> str:
    """A picture of noise, as a data URL of a PNG file."""
    image = image_of_pixels(random.Random(seed).randbytes(3 * side * side), side, side)
    return "data:image/png;base64," + base64.b64encode(image.content).decode()


def chat(client: httpx.Client, model: str = "") -> list[SeenTurn]:
    """The chat, turn by turn. `model`: its name for the server, where that asks."""
    messages: list[dict[str, Any]] = []
    turns: list[SeenTurn] = []
    for turn in range(_TURNS):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Turn {turn}: say what you see and what you saw."}]
        if turn in _IMAGES:
            content.insert(0, {"type": "image_url", "image_url": {"url": picture(_IMAGES[turn])}})
        messages.append({"role": "user", "content": content})
        named = {"model": model} if model else {}
        body = {"messages": messages, "temperature": 0, "max_tokens": _NUM, **named}
        response = client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        reply: dict[str, Any] = response.json()
        usage: dict[str, Any] = reply["usage"]
        details: dict[str, int | None] = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        turns.append(SeenTurn(prompt=usage["prompt_tokens"], cached=cached, generated=usage["completion_tokens"]))
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return turns


def oracle(turns: Sequence[SeenTurn]) -> list[int]:
    """What each turn adds. The last token of an answer was sampled, but not fed."""
    known = [0, *(turn.prompt + turn.generated - 1 for turn in turns)]
    return [turn.prompt - before for turn, before in zip(turns, known, strict=False)]


def encoded(client: httpx.Client) -> int:
    """Images that the tower ran for."""
    lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("reprise_encoded_images_total"))


def beside(directory: Path) -> str:
    """What mlx-vlm's server computes for the same chat, in words."""
    port = free_port()
    command = (sys.executable, "-m", "mlx_vlm.server", "--host", "127.0.0.1", "--model", str(directory))
    url = f"http://127.0.0.1:{port}"
    os.environ |= {"APC_ENABLED": "1", "HF_HUB_OFFLINE": "1"}
    with (
        ServerProcess((*command, "--port", str(port)), url=url),
        httpx.Client(base_url=url, timeout=60.0) as client,
    ):
        try:
            turns = chat(client, str(directory))
        except httpx.HTTPStatusError as error:
            return f"answers {error.response.status_code}: {error.response.text[:120]}"
    computed = sum(turn.computed for turn in turns)
    return f"computed {computed:,}, oracle {sum(oracle(turns)):,}: {computed / sum(oracle(turns)):.2f}"


def seconds_of_text(client: httpx.Client, number: int) -> tuple[float, float]:
    """How long a new prompt of some thousand tokens takes, and then an answer to it of which nothing is prefilled."""
    words = random.Random(number).choices(("What", "is", "on", "this", "side", "of", "the", "lake", "?"), k=1500)
    seconds: list[float] = []
    for num in (1, _NUM_DECODED):
        body = {"messages": [{"role": "user", "content": " ".join(words)}], "temperature": 0, "ignore_eos": True}
        started_s = time.monotonic()
        response = client.post("/v1/chat/completions", json={**body, "max_tokens": num}).raise_for_status()
        seconds.append(time.monotonic() - started_s)
        assert response.json()["usage"]["completion_tokens"] == num, response.text
    return seconds[0], seconds[1]


def text_alone(directory: Path, *, num_rounds: int) -> None:
    """The same text on both sources, up at once and taking turns: medians of the ratios, and their quartiles."""
    options = ("--no-audit", "--no-settle", "--drafts", "off")
    with server(directory, *options) as seeing, server(directory, *options, "--images", "off") as blind:
        ratios: list[tuple[float, float]] = []
        for number in range(-1, num_rounds):
            order = (seeing, blind) if number % 2 else (blind, seeing)
            took = {client: seconds_of_text(client, number) for client in order}
            # The round before the first also compiles.
            if number >= 0:
                ratios.append((took[seeing][0] / took[blind][0], took[seeing][1] / took[blind][1]))
    for name, each in zip(("prefill", "decode"), zip(*ratios, strict=True), strict=True):
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"  {name}: {middle:.2f} times mlx-lm's, quartiles {low:.2f} to {high:.2f}, {num_rounds} rounds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_5")
    parser.add_argument("--beside", action="store_true", help="also mlx-vlm's server")
    parser.add_argument("--text", type=int, metavar="ROUNDS", help="text alone, on both sources, in so many rounds")
    options = parser.parse_args()
    from tests.vision.families import FAMILIES, FURTHER  # noqa: PLC0415 (the extra)
    from tests.vision.tiny import write_seeing_model  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / options.family
        write_seeing_model(directory, {**FAMILIES, **FURTHER}[options.family])
        if options.text is not None:
            print(f"{options.family}: text alone, on the source that sees")
            text_alone(directory, num_rounds=options.text)
            return 0
        with server(directory, "--no-audit", "--no-settle") as client:
            turns = chat(client)
            runs = encoded(client)
        other = beside(directory) if options.beside else None
    least = oracle(turns)
    ratio = sum(turn.computed for turn in turns) / sum(least)
    print(
        f"{options.family}: {_TURNS} turns, {len(_IMAGES)} images, {sum(turn.prompt for turn in turns):,} prompt tokens"
    )
    print(f"  computed {sum(turn.computed for turn in turns):,}, oracle {sum(least):,}: {ratio:.2f}")
    print(f"  tower runs {runs}, distinct images {len(set(_IMAGES.values()))}")
    if other is not None:
        print(f"  mlx-vlm's server: {other}")
    for number, (turn, needed) in enumerate(zip(turns, least, strict=True)):
        if turn.computed != needed:
            print(f"  turn {number}: computed {turn.computed}, oracle {needed}")
    return 0 if f"{ratio:.2f}" == "1.00" and runs == len(set(_IMAGES.values())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
