"""What fits into a machine's memory, and what is suggested for it."""

import json
import shutil
from pathlib import Path

import pytest

from reprise.cli.fitting import CHAT, SUGGESTED, FittingChats, advice, on_a_small_machine, suggestion
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


def test_small_machines_are_told_what_fits_and_with_which_options() -> None:
    def chats(longest: int) -> FittingChats:
        return FittingChats(longest=longest, num_chats=longest // CHAT, context=131_072)

    assert on_a_small_machine(chats(40_000), chats(70_000), chats(90_000), num_gb=16) == (
        "a chat of 40,000 tokens; with --kv-bits 8 (approximate) a chat of 70,000 tokens, or 2 of 32k"
    )
    assert on_a_small_machine(chats(0), chats(0), chats(9000), num_gb=8) == (
        "no chat; with `sudo sysctl iogpu.wired_limit_mb=6144` too a chat of 9,000 tokens"
    )
    assert on_a_small_machine(chats(131_072), chats(131_072), chats(131_072), num_gb=16) == str(chats(131_072))
    nothing = on_a_small_machine(chats(0), chats(0), chats(0), num_gb=8)
    assert nothing == "the weights leave no room for a chat; mlx-community/Qwen3-1.7B-4bit would"


def test_doctor_says_what_fits_on_small_machines_wherever_it_is_asked(tmp_path: Path) -> None:
    """Weights of 8 GB, dimensions of a 7 B model."""
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    large = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({**config, **large, **heads}))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(tiny_model("llama") / name, tmp_path)
    header = json.dumps({"a": {"dtype": "BF16", "shape": [4_000_000_000], "data_offsets": [0, 8_000_000_000]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # A file with a hole: nothing is written.
        file.truncate(8 + len(header) + 8_000_000_000)
    _, told = doctor(str(tmp_path), "--disk-cache", "off")
    small = {line.split()[2]: line for line in told.splitlines() if line.startswith("ok     on ")}
    assert "the weights leave no room for a chat; mlx-community/Qwen3-1.7B-4bit would" in small["8"], told
    assert "a chat of 22," in small["16"] and "with --kv-bits 8 (approximate) a chat of 4" in small["16"], told


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
