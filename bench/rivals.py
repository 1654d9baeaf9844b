"""Both servers side by side on one tiny model, each a process of its own: ours and mlx-lm's."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reprise.demo.server import server
from reprise.demo.tiny.build import QWEN3_5, build_model

_START_S = 180.0

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
class Server:
    name: str
    port: int


@contextmanager
def model(name: str) -> Iterator[Path]:
    """The directory of a tiny model of this architecture, with a long context."""
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        build_model(Path(folder), MODELS[name])
        yield Path(folder)


@contextmanager
def ours(path: Path, *options: str) -> Iterator[Server]:
    with server(path, "--no-settle", *options) as client:
        assert client.base_url.port is not None
        yield Server("reprise", client.base_url.port)


@contextmanager
def theirs(path: Path) -> Iterator[Server]:
    """mlx-lm's own server with its defaults."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(path), "--port", str(port)]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen([*command, "--log-level", "WARNING"], stdout=words, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, process)
            yield Server("mlx-lm", port)
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError("mlx-lm's server did not start")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("mlx-lm's server did not listen in time")
