"""Sessions of agents with images, recorded (`tests/agents/test_agents_see.py`), replayed to a tiny model that sees."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.vision.test_over_http import seeing_server
from tests.vision.tiny import FAMILIES
from tests.workloads.made import filled, places

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

BODIES = Path(__file__).parents[1] / "api" / "bodies" / "images"
NAMES = sorted(path.stem for path in BODIES.glob("*.json"))


@pytest.mark.parametrize(("name", "family"), list(zip(NAMES, itertools.cycle(FAMILIES), strict=False)))
def test_an_image_is_encoded_and_computed_once(name: str, family: str) -> None:
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
    with_image = [record for record in records if record["images"]]
    assert len(with_image) >= 2
    assert [record["images_encoded"] for record in with_image] == [1, *[0] * (len(with_image) - 1)]
    for record in with_image[1:]:
        assert all(image["reused"] for image in record["images"])
        assert record["images"][0]["digest"] == with_image[0]["images"][0]["digest"]


def _short(path: str) -> dict[str, Any]:
    if path.startswith("/api"):
        return {"options": {"num_predict": 3}}
    return {"max_output_tokens" if path.endswith("responses") else "max_tokens": 3}
