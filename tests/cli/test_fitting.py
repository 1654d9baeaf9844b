"""What fits into a machine's memory, and what is suggested for it."""

import json
from pathlib import Path

import pytest

from reprise.cli.fitting import CHAT, SUGGESTED, FittingChats, advice, suggestion
from tests.cli.test_doctor import doctor
from tests.models.tiny import tiny_model

GB = 10**9


@pytest.mark.parametrize(
    ("room", "name"),
    [
        (int(4.5 * GB), "Qwen3-0.6B-4bit"),
        (6 * GB, "Qwen3-1.7B-4bit"),
        (11 * GB, "Qwen3-4B-Instruct-2507-4bit"),
        (18 * GB, "gpt-oss-20b-MXFP4-Q8"),
        (27 * GB, "Qwen3-30B-A3B-Instruct-2507-4bit"),
        (96 * GB, "gpt-oss-120b-MXFP4-Q8"),
    ],
)
def test_the_largest_model_is_suggested_that_leaves_room_for_a_chat(room: int, name: str) -> None:
    found = suggestion(room)
    assert found is not None and found.id == f"mlx-community/{name}"
    assert found.nbytes + CHAT * found.token_nbytes <= room


def test_nothing_is_suggested_where_nothing_fits() -> None:
    assert suggestion(GB) is None
    assert [model.nbytes for model in SUGGESTED] == sorted(model.nbytes for model in SUGGESTED)


def test_who_has_little_memory_is_told_with_which_options() -> None:
    comfortable = FittingChats(longest=40_000, num_chats=1, context=40_000)
    assert advice(comfortable, comfortable, room=8 * GB) == ""
    assert str(comfortable) == "a chat of 40,000 tokens, which is all of its context"
    assert str(FittingChats(longest=100_000, num_chats=3, context=None)) == "a chat of 100,000 tokens, or 3 of 32k"
    little, more = (
        FittingChats(longest=9000, num_chats=0, context=40_000),
        FittingChats(longest=17_000, num_chats=0, context=40_000),
    )
    told = advice(little, more, room=8 * GB)
    assert told.startswith("--kv-bits 8 holds a chat of 17,000 tokens (approximate); --max-batch 1")
    assert told.endswith("or choose a smaller model, such as mlx-community/Qwen3-4B-Instruct-2507-4bit.")
    assert "--kv-bits" not in advice(little, little, room=8 * GB)
    nothing = FittingChats(longest=0, num_chats=0, context=40_000)
    assert advice(nothing, nothing, room=GB) == "Choose a smaller model."


def test_doctor_says_what_fits_beside_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("llama")
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    status, told = doctor(str(model), "--disk-cache", "off")
    assert status == 0 and f"a chat of {context:,} tokens, which is all of its context" in told, told
    # A machine of which the weights leave a part of a chat.
    monkeypatch.setattr("reprise.engine.memory.device_bytes", lambda: 2_000_000)
    status, told = doctor(str(model), "--disk-cache", "off")
    assert status == 0 and "fits beside the weights" in told, told
    assert "-> --max-batch 1" in told or "-> --kv-bits 8" in told, told
    monkeypatch.setattr("reprise.engine.memory.device_bytes", lambda: 1000)
    status, told = doctor(str(model), "--disk-cache", "off")
    assert status == 1 and "no room for a single token" in told
    monkeypatch.setattr("reprise.engine.memory.device_bytes", lambda: 16 * GB)
    _, told = doctor("--disk-cache", "off")
    assert "`reprise serve mlx-community/gpt-oss-20b-MXFP4-Q8` (12.1 GB, about 4 chats of 32k tokens" in told, told
