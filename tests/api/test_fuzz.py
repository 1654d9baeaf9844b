"""No request, however odd, makes the server fail: schemathesis over the server's own description of itself."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.core.settings import Settings
from tests.api.servers import MODEL, running_server
from tests.sdks import schemathesis
from tests.soak.lengths import times


@pytest.fixture(scope="module")
def operations() -> Generator[dict[str, Any]]:
    with running_server(settings=Settings(model=MODEL, accepts_any_model=True)) as server:
        # Some bodies ask for a grammar, which no script can know.
        server.backend.is_cut_by_grammar = True
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        yield {found.ok().label: found.ok() for found in schema.get_all_operations()}


BODIES = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/prefill",
    "POST /v1/cache/pin",
    "DELETE /v1/cache/pin",
    "POST /tokenize",
    "POST /detokenize",
]
ADDRESSES = [
    "GET /v1/cache/requests",
    "GET /v1/cache/requests/{request_id}",
    "DELETE /v1/requests/{request_id}",
    "DELETE /v1/cache",
    "GET /v1/cache/pin",
    "DELETE /v1/cache/pin/{name}",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "GET /health",
    "GET /metrics",
]


def check(operation: Any, mode: str, *, num_cases: int) -> None:
    @settings(max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        response = data.draw(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))).call()
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert "message" in response.json()["error"]

    ask()


# Its package alone takes three seconds to import. `test_mutated_bodies.py` and `test_strict_json.py` are in every run.
@pytest.mark.matrix
@pytest.mark.parametrize("label", [*BODIES, *ADDRESSES])
def test_no_request_makes_the_server_fail(label: str, operations: dict[str, Any]):
    check(operations[label], "positive", num_cases=4)


@pytest.mark.matrix
@pytest.mark.parametrize("label", BODIES)
def test_no_wrong_body_makes_the_server_fail(label: str, operations: dict[str, Any]):
    check(operations[label], "negative", num_cases=4)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("label", BODIES)
def test_many_requests(label: str, mode: str, operations: dict[str, Any]):
    check(operations[label], mode, num_cases=times(16))
