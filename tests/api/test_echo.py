"""`/v1/completions` as evaluations use it: prompts scored by token; the best of several; filling in the middle."""

import json
from dataclasses import replace
from typing import Any

import pytest

from reprise.chat.rendering.infill import InfillMarkers, infill_markers
from reprise.core.job import Job, Purpose
from tests.api.servers import api, says
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


def loglikelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """As lm-eval reads it from an answer of one token."""
    logprobs = choice["logprobs"]
    scores = logprobs["token_logprobs"][num_context:-1]
    top = logprobs["top_logprobs"][num_context:-1]
    return sum(scores), all(score == max(best.values()) for score, best in zip(scores, top, strict=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_scored_in_the_shapes_that_evaluations_read(stream: bool) -> None:
    encode, decode = text_model().encode, text_model().decode
    texts = ["The sky is blue", "One and two"]
    for prompt in (texts, [encode(text) for text in texts]):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
        # The first token ends the answer: it has its place all the same.
        async with api(says("")) as served:
            got = await served.client.post(URL, json={**body, "stream": stream})
            jobs = served.backend.jobs
        choices = _assembled(got.text) if stream else got.json()["choices"]
        assert [job.prompt_logprobs for job in jobs] == [1, 1]
        for choice, text in zip(choices, texts, strict=True):
            tokens = encode(text)
            logprobs = choice["logprobs"]
            assert choice["text"] == text
            assert logprobs["tokens"][:-1] == [decode([token]) for token in tokens]
            assert logprobs["token_logprobs"] == [None, *[-1.5] * (len(tokens) - 1), -0.5]
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["text_offset"][-1] == len(text)
            assert loglikelihood(choice, 2) == (-1.5 * (len(tokens) - 2), True)
        if not stream:
            assert got.json()["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in texts)


def _assembled(stream: str) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for piece in json.loads(line[6:])["choices"]:
            made = choices.setdefault(piece["index"], {"text": "", "logprobs": {}})
            made["text"] += piece["text"]
            for key, values in (piece["logprobs"] or {}).items():
                made["logprobs"].setdefault(key, []).extend(values)
    return [choices[index] for index in sorted(choices)]


async def test_a_prompt_is_scored_without_an_answer() -> None:
    async with api() as served:
        body = {"prompt": [5, 6, 7], "max_tokens": 0, "logprobs": 2, "echo": True}
        got = (await served.client.post(URL, json=body)).json()
        one = (await served.client.post(URL, json={**body, "prompt": [5]})).json()
        (job, _) = served.backend.jobs
    (choice,) = got["choices"]
    assert (job.purpose, choice["finish_reason"]) == (Purpose.PREFILL, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert got["usage"]["completion_tokens"] == 0
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [None]


async def test_the_best_of_several() -> None:
    async with api() as served:
        got = (await served.client.post(URL, json={"prompt": "Hi", "n": 2, "best_of": 4})).json()
        assert len(served.backend.jobs) == 4
        assert [choice["index"] for choice in got["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in got["choices"])
        assert got["usage"]["completion_tokens"] == 4 * len(text_model().encode("Hello there.<|im_end|>"))
        for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
            refused = await served.client.post(URL, json={"prompt": "Hi", **wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


async def test_a_suffix_needs_a_model_that_fills_in() -> None:
    async with api() as served:
        refused = await served.client.post(URL, json={"prompt": "a", "suffix": "b"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
        splitters = {
            **served.service.served.text.splitters,
            "<|fim_prefix|>": 1,
            "<|fim_suffix|>": 2,
            "<|fim_middle|>": 3,
        }
        served.service.served = replace(
            served.service.served, text=replace(served.service.served.text, splitters=splitters)
        )
        got = await served.client.post(URL, json={"prompt": "a", "suffix": "b"})
        (job,) = served.backend.jobs
    encode = text_model().encode
    assert got.status_code == 200
    assert job.prompt.tokens.tolist() == [1, *encode("a"), 2, *encode("b"), 3]
    assert {1, 2, 3} <= job.stop_tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|>", [0, 9, 1, 8, 2]),
        ("<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>", [0, 9, 1, 8, 2]),
        ("▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>", [0, 9, 1, 8, 2]),
        ("[PREFIX] [SUFFIX]", [1, 8, 0, 9]),
        ("<|im_start|> <|im_end|> prefix suffix", None),
    ],
)
def test_markers_are_learnt_from_the_vocabulary(tokens: str, expected: list[int] | None) -> None:
    found: InfillMarkers | None = infill_markers({text: at for at, text in enumerate(tokens.split())})
    assert (None if found is None else found.prompt([9], [8])) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."}], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_a_prompt_is_computed_ahead(path: str, body: dict[str, Any]) -> None:
    async with api() as served:
        got = await served.client.post(path, json={**body, "prompt_cache_options": {"prewarm": True}})
        jobs: list[Job] = list(served.backend.jobs)
    assert got.status_code == 200, got.text
    assert [job.purpose for job in jobs] == [Purpose.PREFILL]
    made = got.json()
    if path == "/v1/responses":
        assert (made["status"], made["output"], made["usage"]["output_tokens"]) == ("completed", [], 0)
    else:
        assert made["choices"][0]["finish_reason"] == "stop" and made["usage"]["completion_tokens"] == 0


async def test_messages_without_an_answer() -> None:
    async with api() as served:
        body = {"max_tokens": 0, "messages": [{"role": "user", "content": "Hi"}]}
        made = (await served.client.post("/v1/messages", json=body)).json()
        (job,) = served.backend.jobs
    assert (job.purpose, made["content"], made["stop_reason"]) == (Purpose.PREFILL, [], "max_tokens")
