"""`reprise inspect` on tiny models: what it says is what the engine does."""

import json
import re
from dataclasses import asdict

import pytest
from mlx_lm.models.cache import KVCache
from typer.testing import CliRunner

from reprise.chat.templates.template_behavior import Place, Thoughts
from reprise.cli.inspection import (
    Layers,
    TemplateReport,
    count_layers,
    describe_kind,
    inspect_model,
    where_it_resumes,
)
from reprise.cli.main import app
from reprise.core.kinds import Chunk, Full, Layout, Window
from reprise.core.settings import Settings
from reprise.engine.models.load import load_model
from reprise.engine.states.blueprint import KvSpec, OpaqueSpec, PartsSpec, StateSpec
from reprise.schedule.state import LAST_SLICE
from tests.models.tiny import WINDOW, tiny_model

BUDGET = 1_000_000_000


def inspect(architecture: str, *, drafts: str = "off") -> TemplateReport:
    directory = str(tiny_model(architecture))
    return inspect_model(load_model(directory), Settings(model=directory, drafts=drafts), budget=BUDGET)


def test_a_hybrid_model() -> None:
    seen = inspect("qwen3_5")
    assert seen.layers == (Layers(kind="recurrent state", num=1), Layers(kind="full attention", num=1))
    assert seen.resumes == "checkpoints"
    # Two heads of 32 float32, keys and values.
    assert seen.per_token == {"full attention": 2 * 2 * 32 * 4}
    assert seen.snapshot > 10_000
    assert seen.alone is None
    assert seen.context == 32768
    assert seen.behavior is not None
    assert (seen.behavior.thoughts, seen.behavior.in_tool_loop) == (Thoughts.STRIPPED, Thoughts.KEPT)
    assert (seen.behavior.tools, seen.behavior.opens_thinking) == (Place.HEAD, True)
    assert (seen.tool_calls.is_understood, seen.tool_calls.is_forcible, seen.tool_calls.is_parallel) == (True,) * 3
    assert "Falcon" in seen.tool_calls.example
    assert seen.sample is not None
    assert [c.kind for c in seen.sample.checkpoints] == ["system", "last-user", "stable"]
    # What is behind the last one is a pass, with the first token of the answer.
    assert 1 < seen.sample.tokens - seen.sample.checkpoints[-1].position <= LAST_SLICE
    for chats in seen.chats:
        assert chats.nbytes == 512 * chats.tokens + 2 * seen.snapshot
        assert chats.num == BUDGET // chats.nbytes


def test_what_a_trial_says_of_drafts_is_said_as_in_health() -> None:
    assert inspect("llama").drafts == "off"
    assert inspect("llama", drafts="always").drafts == "always made"
    assert re.match("not made: no passes|verified in passes of up to", inspect("llama", drafts="auto").drafts)


def test_a_model_of_full_attention_needs_no_checkpoints() -> None:
    seen = inspect("llama")
    assert seen.resumes == "everywhere"
    assert seen.snapshot == 0
    assert seen.interval is None
    assert seen.sample is not None
    assert seen.sample.checkpoints == ()


def test_windows_take_no_more_than_they_cover() -> None:
    seen = inspect("gemma3_text")
    full, window = seen.per_token["full attention"], seen.per_token[f"window of {WINDOW}"]
    assert [chats.nbytes for chats in seen.chats] == [full * c.tokens + window * (WINDOW - 1) for c in seen.chats]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(kinds=(Full(),)), "everywhere"),
        (Layout(kinds=(Full(), Window(8))), "everywhere that its window is stored"),
        (Layout(kinds=(Chunk(8), Full(), Window(8))), "everywhere that its chunk and window is stored"),
        (Layout(kinds=(Full(),), has_snapshots=True), "checkpoints"),
    ],
)
def test_where_it_resumes(layout: Layout, words: str) -> None:
    assert where_it_resumes(layout) == words


def test_layers_are_counted_by_kind() -> None:
    window = KvSpec(Window(4096, 4))
    specs = (window, PartsSpec((StateSpec(2), KvSpec(Full(), 4))), window, KvSpec(Chunk(8192)), OpaqueSpec(KVCache()))
    assert count_layers(specs) == (
        Layers(kind="window of 4,096 with the first 4", num=2),
        Layers(kind="recurrent state and full attention, 4-bit KV", num=1),
        Layers(kind="chunks of 8,192", num=1),
        Layers(kind="own cache class (KVCache)", num=1),
    )
    assert describe_kind(Window(512)) == "window of 512"


def test_for_programs() -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_model("qwen3_5")), "--cache-bytes", "1GB", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    # What passes cost is another number each time.
    assert told | {"drafts": "off"} == json.loads(json.dumps(asdict(inspect("qwen3_5")))) != told


def test_for_a_person() -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_model("qwen3_5")), "--cache-bytes", "1GiB"])
    assert result.exit_code == 0, result.output
    for word in (
        "1 × recurrent state",
        "stable",
        "1.0 GiB",
        "longer than its context",
        "stripped in earlier turns",
        "several at a time",
    ):
        assert word in result.stdout, word
    assert "several at a time" in result.stdout


def test_what_cannot_be_loaded_is_said_in_a_sentence() -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_model("llama")), "--kv-bits", "4"])
    assert result.exit_code == 2
    assert result.stderr.startswith("reprise: ")
    assert result.stderr.endswith("Start it without --kv-bits.\n")
