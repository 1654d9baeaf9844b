"""Sessions of clients with images, recorded (`tests/agents`), replayed to a tiny model that sees."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import rows_now_and_later
from tests.vision.test_over_http import seeing_server
from tests.vision.tiny import FAMILIES
from tests.workloads.made import filled, places

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

BODIES = Path(__file__).parents[1] / "api" / "bodies" / "images"
NAMES = sorted(path.stem for path in BODIES.glob("*.json"))
BODIES_SEEN = list(zip(NAMES, itertools.cycle(FAMILIES), strict=False))
REPLACES = "browser_use_0_13_14"
"""Sends one message anew each time, with the newest screenshot behind a history that grows."""
_SLACK = 12
"""Tokens of a generation prompt, which is no part of the next request, and of an answer that the record replaces."""


@pytest.mark.every_model
@pytest.mark.parametrize(
    ("name", "family"), rows_now_and_later(BODIES_SEEN[::3], BODIES_SEEN[1::3] + BODIES_SEEN[2::3])
)
def test_an_image_is_encoded_once_and_what_is_new_is_computed(name: str, family: str) -> None:
    given = json.loads((BODIES / f"{name}.json").read_text(encoding="utf-8"))
    made: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    with seeing_server(family, accepts_any_model=True) as client:
        for number, request in enumerate(given["requests"]):
            body = json.loads(filled(json.dumps(request), made))
            response = client.post(given["path"], json={**body, **_short(given["path"])})
            assert response.status_code == 200, response.text
            made |= places(number, response.text)
            records.append(client.get(f"/v1/cache/requests/{response.headers['x-request-id']}").json())
    seen = set[str]()
    for record in records:
        digests = [image["digest"] for image in record["images"]]
        assert record["images_encoded"] == len({*digests} - seen)
        seen |= {*digests}
    assert sum(record["images"] != [] for record in records) >= 2
    for before, after in itertools.pairwise(records):
        if name == REPLACES:
            # It parts from the one before it where the history does.
            assert after["matched"] >= before["images"][0]["start"] // 3, after
            continue
        kept = after["images"][: len(before["images"])]
        assert [image["digest"] for image in kept] == [image["digest"] for image in before["images"]]
        assert all(image["reused"] for image in kept)
        assert after["prefilled"] <= after["prompt_tokens"] - before["prompt_tokens"] + _SLACK, after


def _short(path: str) -> dict[str, Any]:
    if path.startswith("/api"):
        return {"options": {"num_predict": 3}}
    if path.endswith("responses"):
        return {"max_output_tokens": 3}
    return {"max_completion_tokens" if path.endswith("completions") else "max_tokens": 3}
