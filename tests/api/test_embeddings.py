"""Embeddings and reranking over HTTP: every form of input and output, what is refused, and how it is shown."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.api.real_server import real_server, server_of_several
from tests.loop.driving import PATIENCE_S
from tests.models.embedders import texts
from tests.sdks import openai

RECORDED = json.loads((Path(__file__).parents[1] / "engine" / "embedders.json").read_text())
KEYS = ("key-a", "key-b")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with server_of_several("llama", "bert", "embed-qwen3", "bert-rerank") as client:
        yield client


def _vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    assert [each["index"] for each in response.json()["data"]] == list(range(len(response.json()["data"])))
    return np.array([each["embedding"] for each in response.json()["data"]])


def _problem(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


def test_a_text_a_list_tokens_and_lists_of_tokens(client: httpx.Client) -> None:
    def vectors(given: Any) -> np.ndarray:
        return _vectors(client.post("/v1/embeddings", json={"model": "bert", "input": given}))

    whole = vectors(list(texts()))
    assert_allclose(whole, RECORDED["bert"], atol=1e-5)
    assert_allclose(vectors(texts()[1]), whole[1:2], atol=1e-6)
    tokens = client.post("/tokenize", json={"model": "bert", "prompt": texts()[0]}).json()["tokens"]
    run = [2, *tokens, 3]
    assert_allclose(vectors(run), whole[:1], atol=1e-6)
    assert_allclose(vectors([run, run]), whole[[0, 0]], atol=1e-6)


def test_base64_is_the_same_vector_and_dimensions_are_cut_and_of_length_one(client: httpx.Client) -> None:
    body = {"model": "bert", "input": "the boat"}
    plain = _vectors(client.post("/v1/embeddings", json=body))[0]
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert_allclose(np.frombuffer(base64.b64decode(packed), dtype="<f4"), plain, rtol=1e-6)
    short = _vectors(client.post("/v1/embeddings", json={**body, "dimensions": 8}))[0]
    assert_allclose(short, plain[:8] / np.linalg.norm(plain[:8]), rtol=1e-5)
    assert "have 32" in _problem(client.post("/v1/embeddings", json={**body, "dimensions": 33}))


def test_a_repeat_is_told_in_usage_record_and_metrics(client: httpx.Client) -> None:
    body = {"model": "bert", "input": "an evening by the river"}
    first, again = (client.post("/v1/embeddings", json=body) for _ in range(2))
    num = first.json()["usage"]["prompt_tokens"]
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again.json()["usage"] == {
        "prompt_tokens": num,
        "total_tokens": num,
        "prompt_tokens_details": {"cached_tokens": num},
    }
    records = client.get("/v1/cache/requests").json()["data"]
    record = next(each for each in records if each["id"] == again.headers["x-request-id"])
    assert (record["api"], record["model"], record["ended"]) == ("embeddings", "bert", "stop")
    assert (record["prompt_tokens"], record["reused"], record["prefilled"]) == (num, num, 0)
    assert 'reprise_requests_total{api="embeddings",model="bert",outcome="stop"}' in client.get("/metrics").text


def test_what_is_too_long_is_refused_with_the_limit_or_cut_if_asked(client: httpx.Client) -> None:
    body = {"model": "bert", "input": ["a", "boat " * 100]}
    assert "Input 1 has 402 tokens, and the model reads at most 48" in _problem(
        client.post("/v1/embeddings", json=body)
    )
    assert client.post("/v1/embeddings", json=body).json()["error"]["code"] == "context_length_exceeded"
    cut = client.post("/v1/embeddings", json={**body, "truncate": True})
    assert cut.json()["usage"]["prompt_tokens"] == 3 + 48
    # As Ollama does.
    ollama = client.post("/api/embed", json=body)
    assert_allclose(ollama.json()["embeddings"], _vectors(cut), atol=1e-6)
    assert "at most 48" in _problem(client.post("/api/embed", json={**body, "truncate": False}))


def test_inputs_that_are_none_are_refused(client: httpx.Client) -> None:
    for given, said in (([], "Send at least one text"), ([[]], "Input 0 is empty"), ([[2, 300]], "0 to 299")):
        assert said in _problem(client.post("/v1/embeddings", json={"model": "bert", "input": given}))
    assert "check_embedding_ctx_length=False" in _problem(
        client.post("/v1/embeddings", json={"model": "bert", "input": [[100_000]]})
    )
    assert client.post("/v1/embeddings", json={"model": "bert", "input": [1.5]}).status_code == 400
    assert client.post("/v1/embeddings", json={"model": "nobody", "input": "a"}).status_code == 404


def test_the_models_own_prompts_stand_before_a_text_where_they_are_asked_for(client: httpx.Client) -> None:
    def vector(text: str, **more: Any) -> np.ndarray:
        return _vectors(client.post("/v1/embeddings", json={"model": "embed-qwen3", "input": text, **more}))

    asked = vector("boat", prompt_name="query")
    assert_allclose(asked, vector("Instruct: find it\nQuery:boat"), atol=1e-6)
    assert np.abs(asked - vector("boat")).max() > 0.01
    assert "Its prompts: query, document" in _problem(
        client.post("/v1/embeddings", json={"model": "embed-qwen3", "input": "a", "prompt_name": "q"})
    )


def test_ollamas_two_forms(client: httpx.Client) -> None:
    whole = client.post("/api/embed", json={"model": "bert:latest", "input": list(texts())}).json()
    assert_allclose(whole["embeddings"], RECORDED["bert"], atol=1e-5)
    assert whole["model"] == "bert" and whole["prompt_eval_count"] > 4 and whole["total_duration"] > 0
    old = client.post("/api/embeddings", json={"model": "bert", "prompt": texts()[0]}).json()
    assert_allclose(old["embedding"], RECORDED["bert"][0], atol=1e-5)
    # Which loads the model.
    assert client.post("/api/embed", json={"model": "bert", "input": []}).json()["embeddings"] == []
    assert client.post("/api/embeddings", json={"model": "bert"}).json()["embedding"] == []


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking"])
def test_documents_are_put_in_order(client: httpx.Client, path: str) -> None:
    body = {"model": "bert-rerank", "query": "the boat", "documents": list(texts()), "return_documents": True}
    answer = client.post(path, json=body).json()
    scores = [score for (score,) in RECORDED["bert-rerank"]]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
        assert each["document"]["text"] == texts()[each["index"]]
    assert answer["usage"]["prompt_tokens"] > 0
    few = client.post(path, json={**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert [each["index"] for each in few] == order[:2] and "document" not in few[0]
    as_objects = client.post(path, json={**body, "documents": [{"text": text} for text in texts()]}).json()
    assert as_objects["results"] == answer["results"]


def test_each_model_is_asked_for_what_it_makes(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
    assert "llama is a chat model" in _problem(client.post("/v1/embeddings", json={"model": "llama", "input": "a"}))
    assert "llama is a chat model" in _problem(client.post("/api/embed", json={"model": "llama", "input": "a"}))
    assert "Use /v1/embeddings" in _problem(client.post("/v1/chat/completions", json={"model": "bert", **chat}))
    assert "Use /v1/embeddings" in _problem(client.post("/v1/messages", json={"model": "bert", **chat}))
    assert "Use /v1/embeddings" in _problem(client.post("/api/chat", json={"model": "bert", **chat}))
    assert "Use /v1/embeddings" in _problem(client.post("/v1/completions", json={"model": "bert", "prompt": "a"}))
    assert "Use /v1/rerank" in _problem(client.post("/v1/chat/completions", json={"model": "bert-rerank", **chat}))
    assert "is a reranker" in _problem(client.post("/v1/embeddings", json={"model": "bert-rerank", "input": "a"}))
    rerank = {"query": "a", "documents": ["b"]}
    assert "bert is no reranker" in _problem(client.post("/v1/rerank", json={"model": "bert", **rerank}))
    assert client.post("/v1/chat/completions", json={"model": "llama", **chat}).status_code == 200


def test_lists_of_models_say_which_makes_what(client: httpx.Client) -> None:
    client.post("/v1/embeddings", json={"model": "bert", "input": "a"})
    client.post("/v1/rerank", json={"model": "bert-rerank", "query": "a", "documents": ["b"]})
    listed = {each["id"]: each.get("type") for each in client.get("/v1/models").json()["data"]}
    assert listed["llama"] is None and listed["bert"] == "embedding" and listed["bert-rerank"] == "rerank"
    shown = client.post("/api/show", json={"model": "bert"}).json()
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["bert.embedding_length"] == 32
    assert "bert" in [each["name"] for each in client.get("/api/tags").json()["models"]]


def test_an_embedder_is_unloaded_and_loaded_again_as_others_are(client: httpx.Client) -> None:
    body = {"model": "bert", "input": "the lamp by the water"}
    before = _vectors(client.post("/v1/embeddings", json=body))
    assert client.post("/v1/models/bert/unload").json()["state"] == "unloaded"
    after = client.post("/v1/embeddings", json=body)
    assert (_vectors(after) == before).all()
    assert client.get("/v1/models/bert").json()["state"] == "ready"
    # What was computed outlived the weights.
    assert after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def until_unloaded(client: httpx.Client, model: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while client.get(f"/v1/models/{model}").json()["state"] != "unloaded":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"model": "bert", "input": "a boat"}),
        ("/api/embed", {"model": "bert:latest"}),
        ("/api/embeddings", {"model": "bert", "prompt": "a boat"}),
    ],
    ids=str,
)
def test_an_embedder_that_is_not_to_be_kept_is_unloaded(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    client.post(path, json={**body, "keep_alive": "5m"}).raise_for_status()
    client.post("/api/embed", json={"model": "bert", "input": "a boat"}).raise_for_status()
    assert client.get("/v1/models/bert").json()["state"] == "ready"
    client.post(path, json={**body, "keep_alive": 0}).raise_for_status()
    until_unloaded(client, "bert")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_model_that_is_not_to_be_kept_answers_and_is_unloaded(client: httpx.Client, is_streamed: bool) -> None:
    body = {"model": "llama", "messages": [{"role": "user", "content": "Hi."}], "stream": is_streamed}
    for keep_alive in ("5m", 0):
        answer = client.post("/api/chat", json={**body, "keep_alive": keep_alive, "options": {"num_predict": 4}})
        assert json.loads(answer.text.splitlines()[-1])["done"] is True
        if keep_alive == "5m":
            assert client.get("/v1/models/llama").json()["state"] == "ready"
    until_unloaded(client, "llama")
    # It is not loaded again for what nobody asks.
    time.sleep(0.5)
    assert client.get("/v1/models/llama").json()["state"] == "unloaded"


def test_alone_an_embedder_is_the_server() -> None:
    with real_server("bert") as client:
        assert_allclose(
            _vectors(client.post("/v1/embeddings", json={"input": list(texts())})), RECORDED["bert"], atol=1e-5
        )
        # More texts than a chat of this model could have commas.
        many = client.post("/v1/embeddings", json={"input": [[2, 10, 3]] * 2000}).json()
        assert len(many["data"]) == 2000 and many["usage"]["prompt_tokens_details"]["cached_tokens"] == 1999 * 3
        for path in ("/health", "/v1/cache/tree", "/v1/cache/requests", "/metrics", "/props", "/api/ps"):
            assert client.get(path).status_code == 200, path
        assert client.get("/health").json()["idle"] is True


def test_keys_with_caches_of_their_own_share_no_vectors() -> None:
    with real_server("bert", api_keys=KEYS, separates_keys=True) as client:
        body = {"input": "a secret"}
        for key, cached in ((KEYS[0], 0), (KEYS[0], 1), (KEYS[1], 0)):
            answer = client.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}"}).json()
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is bool(cached), key
        assert client.post("/v1/embeddings", json=body, headers={"authorization": "Bearer no"}).status_code == 401


def test_openais_library_gets_its_vectors(client: httpx.Client) -> None:
    """It asks for base64 unless it is told otherwise, and unpacks it."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="bert", input=list(texts()))
        assert_allclose([each.embedding for each in answer.data], RECORDED["bert"], atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="llama is a chat model"):
            sdk.embeddings.create(model="llama", input="a")


def test_kept_vectors_are_a_part_of_memory() -> None:
    with real_server("bert") as client:
        before = client.get("/v1/cache/overview").json()["memory"]["parts"]["embeddings"]
        client.post("/v1/embeddings", json={"input": list(texts())})
        after = client.get("/v1/cache/overview").json()["memory"]["parts"]["embeddings"]
        assert before == 0 and after == len(texts()) * (4 * 32 + 200)


_SHAPES = {
    # As these clients send them, trimmed; what is without effect here is noted in the record, and nothing is refused.
    "open-webui, openai": ("/v1/embeddings", {"model": "bert", "input": ["a", "boat"]}),
    "open-webui, ollama": ("/api/embed", {"model": "bert", "input": ["a", "boat"], "truncate": True}),
    "continue, openai": ("/v1/embeddings", {"model": "bert", "input": ["a", "boat"], "encoding_format": "float"}),
    "continue, ollama": ("/api/embed", {"model": "bert", "input": ["a", "boat"], "keep_alive": 1800}),
    "llama.cpp, rerank": ("/v1/rerank", {"model": "bert-rerank", "query": "a", "documents": ["boat"], "top_n": 1}),
    "text-embeddings-inference, rerank": ("/rerank", {"model": "bert-rerank", "query": "a", "texts": ["boat"]}),
    "cohere, rerank": (
        "/v2/rerank",
        {"model": "bert-rerank", "query": "a", "documents": ["boat"], "max_tokens_per_doc": 512},
    ),
}


@pytest.mark.parametrize("client_name", _SHAPES)
def test_bodies_of_clients_are_answered(client: httpx.Client, client_name: str) -> None:
    path, body = _SHAPES[client_name]
    response = client.post(path, json=body, headers={"user-agent": client_name})
    assert response.status_code == 200, response.text
