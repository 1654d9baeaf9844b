"""Both servers side by side on one tiny model, each a process of its own: ours and mlx-lm's."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reprise.lab.bench.server_process import ServerProcess, free_port, mlx_lm_command, server
from reprise.lab.demo.tiny.build import QWEN3_5, build_model

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
MODELS = {
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
