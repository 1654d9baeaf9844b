"""What drafts brought, as clients are told: OpenAI's SDK, records, the overview, and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from tests.api.real_server import real_server
from tests.loop.test_drafts import make_passes_free
from tests.matrix import in_turn
from tests.sdks import openai

KEYS = {"api_keys": ("one", "two"), "separates_keys": True}
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Write the file."}], "max_tokens": 60}
WORDS = " the and is on in it an a day"
"""What the model may say. The tokenizer makes one token of each, so that an answer's text has the answer's tokens."""
WRONG = "Nothing of this is ever said. " * 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SdkAnswer:
    """An answer as the SDK gives it."""

    text: str
    tokens: int
    accepted: int
    rejected: int


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A server that drafts whatever it can, and one that never does."""
    settings: dict[str, Any] = {"is_audit_off": True, "settles": False, "accepts_any_model": True, **KEYS}
    with (
        real_server(request.param, make_passes_free, drafts="always", **settings) as drafting,
        real_server(request.param, drafts="off", **settings) as plain,
    ):
        yield drafting, plain


def ask(server: httpx.Client, *, is_streamed: bool, key: str = "one", **more: Any) -> SdkAnswer:
    text: list[str] = []
    usage = None
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0) as client:
        if is_streamed:
            asked = ASKED | more | {"stream_options": {"include_usage": True}}
            with client.chat.completions.create(stream=True, **asked) as chunks:
                for chunk in chunks:
                    assert usage is None
                    usage = chunk.usage
                    text += [said(choice.delta) for choice in chunk.choices]
        else:
            made = client.chat.completions.create(**ASKED | more)
            usage = made.usage
            text = [said(made.choices[0].message)]
    assert usage is not None and usage.completion_tokens_details is not None
    told = usage.completion_tokens_details
    assert told.accepted_prediction_tokens is not None and told.rejected_prediction_tokens is not None
    return SdkAnswer(
        text="".join(text),
        tokens=usage.completion_tokens,
        accepted=told.accepted_prediction_tokens,
        rejected=told.rejected_prediction_tokens,
    )


def said(message: Any) -> str:
    """The template of these models opens a thought, which this one never ends."""
    extra: dict[str, Any] = message.model_extra or {}
    return extra.get("reasoning_content") or message.content or ""


def idle(server: httpx.Client) -> dict[str, Any]:
    while not (health := server.get("/health").json())["idle"]:
        pass
    return health


def records(server: httpx.Client) -> list[dict[str, Any]]:
    """The records of key one, newest first."""
    idle(server)
    return server.get("/v1/cache/requests", params={"limit": 200}, headers=ONE).json()["data"]


@pytest.mark.parametrize(
    ("is_streamed", "sampling"), in_turn([False, True], [{"temperature": 0}, {"temperature": 0.9, "seed": 5}])
)
def test_the_sdk_reads_how_much_of_a_prediction_was_right(
    pair: tuple[httpx.Client, httpx.Client], sampling: dict[str, Any], *, is_streamed: bool
) -> None:
    drafting, plain = pair
    # Each case has a chat of its own, so that a prediction is all that can be drafted from.
    case: dict[str, Any] = {"messages": [{"role": "user", "content": f"Write {sampling} {is_streamed}."}], **sampling}
    words = plain.post("/tokenize", json={"prompt": WORDS, "add_special_tokens": False}, headers=ONE).json()["tokens"]
    assert len(words) == len(WORDS.split())
    case["logit_bias"] = {str(token): 100 for token in words}
    expected = ask(plain, is_streamed=is_streamed, **case)
    assert (expected.accepted, expected.rejected) == (0, 0)
    given = {"type": "content", "content": expected.text}
    told = ask(drafting, is_streamed=is_streamed, prediction=given, **case)
    assert (told.text, told.tokens) == (expected.text, expected.tokens)
    assert told.accepted > told.tokens // 2
    (record, *_) = records(drafting)
    assert (record["accepted"], record["drafted"]) == (told.accepted, told.accepted + told.rejected)
    assert record["drafts"]["prediction"]["accepted"] > 0
    # A retry is drafted from the answer that was given, whatever its client predicts.
    wrong = {"type": "content", "content": [{"type": "text", "text": WRONG}]}
    again = ask(drafting, is_streamed=is_streamed, prediction=wrong, **case)
    assert (again.text, again.tokens) == (expected.text, expected.tokens)
    assert again.accepted > again.tokens // 2


def test_overview_and_terminal_add_up_what_the_records_say(
    pair: tuple[httpx.Client, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting, plain = pair
    wrong = {"type": "content", "content": WRONG}
    for seed in range(3):
        ask(drafting, is_streamed=False, temperature=0)
        ask(drafting, is_streamed=False, temperature=1, seed=seed, prediction=wrong)
    mine, told = records(drafting), drafting.get("/v1/cache/overview", headers=ONE).json()["drafts"]
    assert sum(record["accepted"] > 0 for record in mine) > 1
    assert told["accepted"] == sum(record["accepted"] for record in mine) < told["drafted"]
    assert told["drafted"] == sum(record["drafted"] for record in mine)
    assert told["saved_s"] == pytest.approx(sum(record["draft_saved_s"] for record in mine))
    for source, counts in told["sources"].items():
        by_source = [record["drafts"].get(source, {"drafted": 0, "accepted": 0}) for record in mine]
        assert counts == {name: sum(each[name] for each in by_source) for name in ("drafted", "accepted")}
    # The order of the sources is always the same.
    assert list(told["sources"]) == [source for source in idle(drafting)["drafted"] if source in told["sources"]]
    nothing: dict[str, Any] = {"saved_s": 0, "drafted": 0, "accepted": 0, "sources": {}}
    assert drafting.get("/v1/cache/overview", headers=TWO).json()["drafts"] == nothing
    assert plain.get("/v1/cache/overview", headers=ONE).json()["drafts"] is None
    monkeypatch.setenv("COLUMNS", "200")
    for server, key, is_told in ((drafting, "one", True), (drafting, "two", False), (plain, "one", False)):
        shown = CliRunner().invoke(app, ["top", "--once", "--url", str(server.base_url), "--api-key", key])
        assert shown.exit_code == 0, shown.output
        text = f"drafts: {told['accepted']:,} of {told['drafted']:,} tokens accepted"
        assert (text in shown.output) is is_told
