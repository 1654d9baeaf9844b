"""A model over two processes: the same tokens as in one, reuse as in one, and an end with a sentence when one dies."""

import json
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.disk.records.format import read_header
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.models.tiny import tiny_model
from tests.ranks.group import RankProcesses
from tests.soak.lengths import times

_REPRISE = str(Path(sys.executable).parent / "reprise")


@contextmanager
def serving(directory: Path, architecture: str, *options: str) -> Generator[tuple[RankProcesses, httpx.Client]]:
    """A server over two ranks, and a client of it."""
    command = [_REPRISE, "serve", str(tiny_model(architecture)), "--tensor-parallel", "--port", "0", *options]
    with RankProcesses(command, directory) as group:
        line = next(line for line in group.wait_for("Serving ").splitlines() if line.startswith("Serving "))
        url = line.partition(" at ")[2].partition(" ")[0]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            yield group, client


def _complete(client: httpx.Client, prompt: list[int], num: int) -> tuple[str, int]:
    """The text of a greedy completion, and how many tokens of the prompt were reused."""
    body = {"prompt": prompt, "max_tokens": num, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return _clean(answer["choices"][0]["text"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _text(engine: DrivenEngine, tokens: list[int]) -> str:
    return _clean(engine.model.text.decode(tokens))


def _clean(text: str) -> str:
    """Without pieces of characters, which a stream leaves out."""
    return text.replace("\ufffd", "")


@pytest.mark.matrix
def test_two_processes_answer_as_one_and_end_when_one_dies(tmp_path: Path) -> None:
    prompt = [(7 * i) % 300 for i in range(60)]
    with serving(tmp_path, "llama") as (group, client):
        text, reused = _complete(client, prompt, 12)
        engine = DrivenEngine("llama")
        expected = engine.run(prompt, num=12).tokens
        assert text == _text(engine, expected)
        longer = [*prompt, *expected, 3, 4]
        assert _complete(client, longer, 4) == (_text(engine, engine.cold(longer, num=4)), len(longer) - 3)
        assert (reused, _complete(client, prompt, 12)) == (0, (text, len(prompt)))
        engine.close()
        answers: list[httpx.Response] = []
        body = {"prompt": prompt[:9], "max_tokens": 4000, "temperature": 0}
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
        asking.start()
        due_s = time.monotonic() + PATIENCE_S
        while client.get("/health").json()["decoding"] == 0:
            assert asking.is_alive() and time.monotonic() < due_s, group.log(0)
            time.sleep(0.02)
        group.processes[1].kill()
        asking.join(PATIENCE_S)
        assert answers[0].status_code == 503 and "Restart the server." in answers[0].json()["error"]["message"]
        assert group.wait() == [75, -signal.SIGKILL]


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_5"])
def test_after_a_kill_of_all_ranks_only_what_is_new_is_computed(tmp_path: Path, architecture: str) -> None:
    disk = tmp_path / "disk"
    options = ("--disk-cache", str(disk), "--disk-bytes", "1GB")
    prompt = [(7 * i + i // 9) % 300 for i in range(600)]
    engine = DrivenEngine(architecture)
    expected = engine.run(prompt, num=12).tokens
    longer = [*prompt, *expected, 3, 4]
    with serving(tmp_path, architecture, *options) as (group, client):
        assert _complete(client, prompt, 12) == (_text(engine, expected), 0)
        # The last token of an answer is not fed.
        _wait_for_files(disk, len(longer) - 3, group)
        for process in group.processes:
            process.kill()
        assert group.wait() == [-signal.SIGKILL, -signal.SIGKILL]
    with serving(tmp_path, architecture, *options) as (group, client):
        assert _complete(client, longer, 4) == (_text(engine, engine.cold(longer, num=4)), len(longer) - 3)
        alone = DrivenEngine(architecture, disk_directory=str(disk))
        assert alone.run(longer, num=1).computed == len(longer)
        alone.close()
        assert client.delete("/v1/cache").is_success
        folders = [folder for folder in disk.iterdir() if (folder / "servers").is_dir()]
        assert sorted(len(list(folder.rglob("*.kv"))) > 0 for folder in folders) == [False, False, True]
        for process in group.processes:
            process.send_signal(signal.SIGTERM)
        assert group.wait() == [0, 0]
    engine.close()


def _wait_for_files(disk: Path, position: int, group: RankProcesses) -> None:
    """Until each of two ranks has a record that ends there."""
    due_s = time.monotonic() + PATIENCE_S
    while len({file.parent.parent for file in disk.rglob("*.kv") if _end_of(file) == position}) < 2:
        assert time.monotonic() < due_s, group.log(0) + group.log(1)
        time.sleep(0.05)


def _end_of(file: Path) -> int:
    with file.open("rb") as opened:
        return read_header(opened, file.stat().st_size).entry.stop


@pytest.mark.matrix
def test_a_rank_that_hangs_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "qwen3_5", "--stall-after", "2") as (group, client):
        text, _ = _complete(client, [1, 2, 3], 4)
        assert text != ""
        group.processes[1].send_signal(signal.SIGSTOP)
        answer = client.post("/v1/completions", json={"prompt": [4, 5, 6], "max_tokens": 50, "temperature": 0})
        assert answer.status_code == 503 and "has not answered for 2 s" in answer.json()["error"]["message"]
        assert group.processes[0].wait(PATIENCE_S) == 75
        group.processes[1].send_signal(signal.SIGCONT)
        # It finds rank 0 gone.
        assert group.processes[1].wait(PATIENCE_S) == 75


@pytest.mark.matrix
def test_a_rank_whose_group_never_forms_ends(tmp_path: Path) -> None:
    script = """if True:
        import mlx.core as mx
        from reprise.cluster.ranks.group import ended_if_alone

        with ended_if_alone(0.2):
            mx.distributed.init(strict=True, backend="ring")
    """
    with RankProcesses([sys.executable, "-c", script], tmp_path, only=1) as group:
        assert group.wait() == [-signal.SIGALRM]


@pytest.mark.matrix
def test_the_other_rank_ends_with_rank_0(tmp_path: Path) -> None:
    with serving(tmp_path, "llama") as (group, client):
        assert _complete(client, [1, 2, 3], 4)[1] == 0
        for process in group.processes:
            process.send_signal(signal.SIGTERM)
        assert group.wait() == [0, 0]
    with serving(tmp_path, "llama") as (group, client):
        group.processes[0].kill()
        assert group.wait() == [-signal.SIGKILL, 75]


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["gemma3_text", "mamba2"])
def test_what_mlx_lm_does_not_split_is_refused_with_the_list(tmp_path: Path, architecture: str) -> None:
    command = [_REPRISE, "serve", str(tiny_model(architecture)), "--tensor-parallel", "--port", "0"]
    with RankProcesses(command, tmp_path) as group:
        assert group.wait()[0] == 2
        assert "cannot split this architecture over ranks. It splits: deepseek_v2," in group.log(0)


@pytest.mark.matrix
def test_other_options_on_another_rank_are_refused(tmp_path: Path) -> None:
    options = "--tensor-parallel --port 0 --kv-group-size $((32 + 32 * MLX_RANK))"
    script = f"exec {_REPRISE} serve {tiny_model('llama')} {options}"
    with RankProcesses(["bash", "-c", script], tmp_path) as group:
        assert group.wait()[0] == 2
        assert "Rank 1 and rank 0 differ in --kv-bits, --kv-group-size or --chat-template" in group.log(0)


@pytest.mark.matrix
@pytest.mark.parametrize(("cache_bytes", "drafts"), [(0, "always"), (300_000, "off")])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_5"])
def test_random_chats_on_two_ranks(tmp_path: Path, architecture: str, cache_bytes: int, drafts: str) -> None:
    _chat(tmp_path, architecture, seed=1, num_bursts=6, cache_bytes=cache_bytes, drafts=drafts)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_5"])
def test_no_operation_is_entered_by_some_ranks_only(tmp_path: Path, architecture: str) -> None:
    """Cancels, failures, evictions and reads from disk, over 10^5 operations with ``SOAK=30``."""
    bursts = times(24)
    seen = _chat(tmp_path, architecture, seed=5, num_bursts=bursts, cache_bytes=300_000, drafts="always", has_disk=True)
    assert seen["num_operations"] > 30 * bursts and seen["loaded"] > 0, seen


def _chat(
    directory: Path,
    architecture: str,
    *,
    seed: int,
    num_bursts: int,
    cache_bytes: int,
    drafts: str,
    has_disk: bool = False,
) -> dict[str, Any]:
    """What was seen, in at most ten seconds a burst."""
    disk = str(directory / "disk") if has_disk else ""
    given = {"seed": seed, "num_bursts": num_bursts, "cache_bytes": cache_bytes, "drafts": drafts, "disk": disk}
    program = [sys.executable, "-m", "tests.ranks.random_chats_on_ranks", str(tiny_model(architecture))]
    with RankProcesses([*program, json.dumps(given)], directory) as group:
        status = group.wait(max(PATIENCE_S, 10.0 * num_bursts))
        assert status == [0, 0], (group.log(0)[-4000:], group.log(1)[-2000:])
        seen = json.loads(next(line for line in group.log(0).splitlines() if line.startswith("{")))
        assert seen["compared"] > 0 and seen["reused"] > 0, seen
        return seen
