"""Sampling as the model's makers meant it, unless the command line or the request says otherwise; the record tells."""

from dataclasses import replace
from typing import Any

import pytest

from reprise.core.job import SamplingDefaults, read_generation_config
from reprise.core.settings import Settings
from tests.api.servers import MODEL, Api, api

pytestmark = pytest.mark.anyio

MODELS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
HELLO = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "responses": ("/v1/responses", {"input": "Hello"}),
    "messages": ("/v1/messages", {"max_tokens": 7, "messages": HELLO}),
}


def set_defaults(served: Api, **by_flag: float) -> None:
    defaults = SamplingDefaults(by_flag=by_flag, by_model=MODELS)
    served.service.served = replace(served.service.served, sampling=defaults)


async def recorded(served: Api) -> dict[str, tuple[Any, str]]:
    await served.until_idle()
    page = (await served.client.get("/v1/cache/requests")).json()
    return {name: (used["value"], used["from"]) for name, used in page["data"][0]["sampling"].items()}


@pytest.mark.parametrize(
    "name", ["chat", *(pytest.param(n, marks=pytest.mark.matrix) for n in REQUESTS if n != "chat")]
)
async def test_who_chose_what(name: str) -> None:
    path, body = REQUESTS[name]
    async with api() as served:
        set_defaults(served, top_p=0.5)
        assert (await served.client.post(path, json={**body, "temperature": 0.2})).status_code == 200
        used = await recorded(served)
        (job, *_) = served.backend.jobs
    assert used["temperature"] == (0.2, "request")
    assert used["top_p"] == (0.5, "flag")
    assert used["top_k"] == (20, "generation_config")
    assert used["repetition_penalty"] == (1.05, "generation_config")
    assert used["min_p"] == (0.0, "default")
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.2, 0.5, 20, 1.05)
    assert used["max_tokens"] == ((7, "request") if name == "messages" else (job.max_tokens, "default"))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("bound", [None, 50])
async def test_an_answer_that_nobody_bounds_gets_what_the_context_leaves(name: str, bound: int | None) -> None:
    path, body = REQUESTS[name]
    field = "max_output_tokens" if name == "responses" else "max_tokens"
    async with api(context=300, settings=Settings(model=MODEL, max_tokens=bound)) as served:
        bodies = [{**body, field: -1}] if name == "messages" else [body, {**body, field: -1}]
        for one in bodies:
            assert (await served.client.post(path, json=one)).status_code == 200
        refused = await served.client.post(path, json={**body, field: -2})
    assert refused.status_code == 400
    for job in served.backend.jobs:
        if job.max_tokens > 0:
            assert job.max_tokens == (300 - len(job.prompt) if bound is None else bound)


async def test_template_options_of_the_server_give_way_to_those_of_a_request() -> None:
    async with api(template="thinking_off_mark") as served:
        prompts: list[int] = []
        for ours, theirs in (
            ({}, {}),
            ({"enable_thinking": False}, {}),
            ({"enable_thinking": False}, {"enable_thinking": True}),
        ):
            served.service.served = replace(served.service.served, template_options=ours)
            body = {"messages": HELLO, "chat_template_kwargs": theirs}
            got = await served.client.post("/v1/chat/completions", json=body)
            prompts.append(got.json()["usage"]["prompt_tokens"])
    plain, without, again = prompts
    assert plain == again != without


def test_a_generation_config_is_read_with_care() -> None:
    read = read_generation_config(
        {"do_sample": True, "temperature": 0.7, "top_p": 1.5, "top_k": 10**9, "min_p": True, "eos_token_id": [1]},
        vocab_size=1000,
    )
    assert read == {"temperature": 0.7}
    assert read_generation_config({"do_sample": False, "temperature": 0.7}, vocab_size=9)["temperature"] == 0
    assert read_generation_config({"repetition_penalty": 1.1}, vocab_size=9)["repetition_context_size"] > 1000
