"""Both servers side by side on one tiny model, each a process of its own: ours and mlx-lm's."""

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tiny.build import QWEN3_5, build_model
from reprise.lab.bench.server_process import ServerProcess, free_port, mlx_lm_command, server

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
}
MODELS = {
    "gemma3": GEMMA3,
    "llama": LLAMA,
    "qwen3_5": {**QWEN3_5, "text_config": {**QWEN3_5["text_config"], "max_position_embeddings": 131072}},
}


@dataclass(frozen=True, slots=True)
class RivalServer:
    name: str
    port: int


@contextmanager
def model(name: str) -> Generator[Path]:
    """The directory of a tiny model of this architecture, with a long context."""
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        build_model(Path(folder), MODELS[name])
        yield Path(folder)


@contextmanager
def for_mlx_vlm(path: Path) -> Generator[Path]:
    """The same model in a directory that mlx-vlm loads: it wants a Qwen3.5 without a tower named and described so."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] | None = config.get("text_config")
    if text is None:
        yield path
        return
    # A position of text has the same number in all three axes, so how they share the rotations changes nothing.
    rotations = round(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]) // 2
    section = [rotations - 2 * (rotations // 3), rotations // 3, rotations // 3]
    rope = {**text["rope_parameters"], "mrope_section": section}
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        for file in path.iterdir():
            if file.name != "config.json":
                Path(folder, file.name).symlink_to(file)
        Path(folder, "config.json").write_text(json.dumps({**text, **ends, "rope_parameters": rope}), encoding="utf-8")
        yield Path(folder)


@contextmanager
def ours(path: Path, *options: str) -> Generator[RivalServer]:
    with server(path, "--no-settle", *options) as client:
        assert client.base_url.port is not None
        yield RivalServer("reprise", client.base_url.port)


@contextmanager
def theirs(path: Path) -> Generator[RivalServer]:
    """mlx-lm's own server with its defaults."""
    port = free_port()
    with ServerProcess(mlx_lm_command(path, port), url=f"http://127.0.0.1:{port}"):
        yield RivalServer("mlx-lm", port)
