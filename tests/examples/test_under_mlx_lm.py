"""The example under mlx-lm's own generators: warm answers are cold ones, and it needs nothing of the server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator

from examples.under_mlx_lm import CachedPrompts
from tests.models.tiny import tiny_model

# Full attention; with windows that have wrapped; with recurrent states; recurrent states alone.
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_5", "mamba2")
NUM_ANSWERED = 12
SHARED = [number % 200 + 20 for number in range(61)]
PROMPTS = [[*SHARED, *range(30 + 7 * each, 47 + 9 * each)] for each in range(3)]


def cold(model: Any, tokenizer: Any, prompt: list[int]) -> list[int]:
    """As mlx-lm answers without us."""
    pieces = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NUM_ANSWERED)
    return [piece.token for piece in pieces]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_warm_is_cold_in_a_stream(architecture: str) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model(architecture)))[:2]
    prompts = CachedPrompts(model, nbytes=1 << 30)
    for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        before = prompts.num_computed
        caches, rest = prompts.begin(prompt, boundaries=[len(SHARED)])
        computed = prompts.num_computed - before
        # The shared beginning once, and nothing of a prompt that was there.
        assert computed == (len(prompt) - 1, *(len(each) - 1 - len(SHARED) for each in PROMPTS[1:]), 0)[number]
        warm = mlx_lm.stream_generate(model, tokenizer, rest, prompt_cache=caches, max_tokens=NUM_ANSWERED)
        assert [piece.token for piece in warm] == cold(model, tokenizer, prompt)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_warm_is_cold_in_a_batch(architecture: str) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model(architecture)))[:2]
    prompts = CachedPrompts(model, nbytes=1 << 30)
    begun = [prompts.begin(prompt, boundaries=[len(SHARED)]) for prompt in (*PROMPTS, PROMPTS[0])]
    generator = BatchGenerator(model, max_tokens=NUM_ANSWERED)
    uids = generator.insert([rest for _, rest in begun], caches=[caches for caches, _ in begun])
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
    generator.close()
    assert list(answers.values()) == [cold(model, tokenizer, prompt) for prompt in (*PROMPTS, PROMPTS[0])]


def test_it_runs_where_nothing_of_a_server_is_installed() -> None:
    absent = ("fastapi", "starlette", "uvicorn", "typer", "rich", "prometheus_client", "pydantic", "llguidance")
    absent = (*absent, "prompt_toolkit", "tomlkit", "ruamel", "psutil", "httpx_sse", "platformdirs")
    program = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
import mlx_lm
from examples.under_mlx_lm import CachedPrompts
model, _ = mlx_lm.load({str(tiny_model("llama"))!r})[:2]
prompts = CachedPrompts(model, nbytes=1 << 30)
prompts.begin(list(range(20, 60)))
prompts.begin(list(range(20, 60)))
print(prompts.num_computed)
"""
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root)
    assert ran.stdout == "39\n", ran.stderr[-2000:]
