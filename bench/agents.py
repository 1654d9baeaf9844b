"""Plays recorded agent sessions through our server, mlx-lm's and mlx-vlm's with the same memory: tokens, and waits.

    python -m bench.agents sessions.jsonl.gz [--layers llama] [--sessions 5] [--requests 14] [--live 1] [--divide 64]

The file has a session of kv-cache-tester on each line, gzipped or not. Lengths are divided, the structure is exact:
which prompt repeats how much of which, sub-agents as chats of their own, how many sessions are under way together, in
the order of their times. The texts are made up, and each prompt is a chat that holds its answers, as a client would
send it. Each request goes to every server before the next one; nothing is computed while idle.

`--room`: the memory for prefixes, in prompts as long as the longest; what runs comes on top, on every server, or with
`--total` not on ours, whose bound counts it; how much it was at most is printed. Ours is played without a bound, too:
what the bound alone costs is the difference. mlx-vlm's server takes part where the extra `vision` is installed, with
its prefix cache on, which is off by default. `--vs`: another server with the same model and memory, which runs already.

Computed ÷ oracle: the oracle remembers every prompt, and computes what none of them began with. Counts are exact; times
are for comparison within a run.
"""

import argparse
import gzip
import heapq
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import httpx
import numpy as np

from bench.rivals import MODELS, for_mlx_vlm, model
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.core.tokens import Tokens
from reprise.engine.models.load import load_text_model
from reprise.engine.running.outline import outline_of
from reprise.lab.bench.client import ClientReply, Post, Refused
from reprise.lab.bench.server_process import ServerProcess, free_port, mlx_lm_command
from reprise.lab.bench.sides import MlxLmSide, RepriseSide, Side, UrlSide, started
from reprise.lab.bench.words import WORDS
from reprise.lab.demo.oracle import Oracle

_TIMEOUT_S = 300.0
_MOST_ENTRIES = 100_000
"""mlx-lm bounds its cache by entries too: more than there are requests, so that bytes alone decide."""

_GROWTH = 512
"""Positions that a running sequence has room for behind its prompt."""

_HEADINGS = "server       requests     prompt   computed  ÷ oracle    p50 ms    p95 ms"

OURS, ENDLESS, MLX_VLM = "reprise", "no bound", "mlx-vlm"
_NO_BOUND = "64GB"

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """One request: `at_s` seconds after its session's start, with the numbers of its prompt's blocks."""

    at_s: float
    agent: str
    blocks: Blocks
    num_answered: int
    """Blocks of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedChat:
    """A prompt as messages: who says which blocks."""

    said: tuple[tuple[str, Blocks], ...] = ()

    def asked(self, blocks: Blocks, num_answered: int) -> "PlayedChat":
        """The chat whose prompt is these blocks, after this one, which got an answer of so many blocks."""
        kept: list[tuple[str, Blocks]] = []
        at = 0
        for role, own in self.said:
            num = _num_common(own, blocks[at:])
            if num > 0:
                kept.append((role, own[:num]))
            at += num
            if num < len(own):
                break
        is_whole = at == sum(len(own) for _, own in self.said)
        if not kept:
            # A chat begins with its system prompt: what is shared is found by its text.
            return PlayedChat(said=(("system", blocks[: len(blocks) // 2 or 1]), ("user", blocks[len(blocks) // 2 :])))
        # What came back is never empty, nor is an answer: both have one block of the new ones at least.
        answered = max(0, min(max(1, num_answered), len(blocks) - at - 1)) if is_whole else 0
        parts = (("assistant", blocks[at : at + answered]), ("user", blocks[at + answered :]))
        return PlayedChat(said=(*kept, *(part for part in parts if part[1])))

    def messages(self, words_per_block: int, session: str) -> list[dict[str, str]]:
        texts = [(role, " ".join(_words(f"{session} {n}", words_per_block) for n in own)) for role, own in self.said]
        messages = [{"role": role, "content": text} for role, text in texts]
        # A history that was cut within an answer: templates want a user's word at the end.
        return messages if texts[-1][0] == "user" else [*messages, {"role": "user", "content": "Go on."}]


def sessions_of(file: Path) -> Iterator[list[AgentCall]]:
    """The calls of each session in the order of their times."""
    with ExitStack() as stack:
        raw = stack.enter_context(file.open("rb"))
        for line in stack.enter_context(gzip.open(raw)) if file.suffix == ".gz" else raw:
            session: Mapping[str, Any] = json.loads(line)
            block = int(session["block_size"])
            found: list[AgentCall] = []
            numbers = count()
            for record in session["requests"]:
                is_sub = record.get("type") == "subagent"
                agent, start_s = (f"agent {next(numbers)}", float(record["t"])) if is_sub else ("main", 0.0)
                found += [
                    AgentCall(
                        at_s=start_s + float(each["t"]),
                        agent=agent,
                        blocks=_expanded(each["hash_ids"]),
                        num_answered=round(int(each["out"]) / block),
                    )
                    for each in (record["requests"] if is_sub else (record,))
                    if each["hash_ids"]
                ]
            yield sorted(found, key=lambda call: call.at_s)


def played(
    sessions: Sequence[Sequence[AgentCall]], *, num_live: int, words_per_block: int
) -> Iterator[list[dict[str, str]]]:
    """The messages of each request, `num_live` sessions side by side; when one ends, the next begins."""
    waiting = iter(enumerate(sessions))
    under_way: list[tuple[float, int, float, Iterator[AgentCall]]] = []
    chats: dict[tuple[int, str], tuple[PlayedChat, int]] = {}

    def go_on(number: int, start_s: float, calls: Iterator[AgentCall], end_s: float) -> None:
        upcoming = next(calls, None)
        if upcoming is None:
            number, following = next(waiting, (number, ()))
            start_s, calls = end_s, iter(following)
            upcoming = next(calls, None)
        if upcoming is not None:
            heapq.heappush(under_way, (start_s + upcoming.at_s, number, start_s, chain((upcoming,), calls)))

    for number, session in list(islice(waiting, num_live)):
        go_on(number, 0.0, iter(session), 0.0)
    while under_way:
        at_s, number, start_s, calls = heapq.heappop(under_way)
        call = next(calls)
        before, num_answered = chats.get((number, call.agent), (PlayedChat(), 0))
        chat = before.asked(call.blocks, num_answered)
        chats[number, call.agent] = chat, call.num_answered
        yield chat.messages(words_per_block, str(number))
        go_on(number, start_s, calls, at_s)


def _expanded(runs: Sequence[int | Sequence[int]]) -> Blocks:
    parts = ((run,) if isinstance(run, int) else range(run[0], run[1] + 1) for run in runs)
    return tuple(chain.from_iterable(parts))


def _num_common(one: Blocks, other: Blocks) -> int:
    num = min(len(one), len(other))
    return next((at for at in range(num) if one[at] != other[at]), num)


def _words(seed: str, num: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=num))


class _BoundedMlxVlm(Side):
    """mlx-vlm's server with its prefix cache of so many bytes, in memory alone."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(MLX_VLM)
        self._original, self._path, self._nbytes = path, str(path), nbytes

    def _connect(self, running: ExitStack) -> httpx.Client:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        # Bytes alone decide: by default it keeps 2,048 blocks of 16 tokens, and the states of two prompts.
        options = {
            "APC_ENABLED": "1",
            "APC_DISK_ENABLED": "0",
            "APC_MEMORY_MAX_GB": f"{self._nbytes / (1 << 30):.9f}",
            "APC_NUM_BLOCKS": str(_MOST_ENTRIES),
            "APC_CHECKPOINT_ENTRIES": str(_MOST_ENTRIES),
            "HF_HUB_OFFLINE": "1",
        }
        self._path = str(running.enter_context(for_mlx_vlm(self._original)))
        command = (sys.executable, "-m", "mlx_vlm.server", "--model", self._path, "--host", "127.0.0.1")
        server = ServerProcess((*command, "--port", str(port)), url=url, environment=options)
        self._process = running.enter_context(server)
        return running.enter_context(httpx.Client(base_url=url))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def adapted(self, post: Post) -> Post:
        return replace(post, body={**post.body, "model": self._path})


class _BoundedMlxLm(MlxLmSide):
    """mlx-lm's server with so many bytes for prefixes."""

    def __init__(self, path: str, nbytes: int) -> None:
        super().__init__(path)
        self._nbytes = nbytes

    def _connect(self, running: ExitStack) -> httpx.Client:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        bound = ("--prompt-cache-bytes", str(self._nbytes), "--prompt-cache-size", str(_MOST_ENTRIES))
        command = (*mlx_lm_command(self._model, port), *bound)
        self._process = running.enter_context(ServerProcess(command, url=url))
        return running.enter_context(httpx.Client(base_url=url))


@dataclass(frozen=True, slots=True, kw_only=True)
class SideTally:
    """What a server did with all requests, as it says itself; `refusal`: why it did not get to their end."""

    name: str
    replies: tuple[ClientReply, ...]
    refusal: str | None = None

    def line(self, oracle: int, num_prompt: int) -> str:
        waits = [reply.ttft_s for reply in self.replies]
        cuts = quantiles(waits, n=20, method="inclusive") if len(waits) > 1 else [0.0] * 19
        told = [reply.num_computed for reply in self.replies]
        computed = sum(num for num in told if num is not None)
        share = f"{computed:>10,} {computed / oracle:>9.2f}" if None not in told and oracle else f"{'?':>10} {'?':>9}"
        line = f"{self.name:<12} {len(waits):>8} {num_prompt:>10,} {share} {1e3 * cuts[9]:>9.0f} {1e3 * cuts[18]:>9.0f}"
        return line if self.refusal is None else f"{line}   {self.refusal}"


def play(sides: Sequence[Side], requests: Sequence[Sequence[dict[str, str]]]) -> list[SideTally]:
    """Ask every side each request before the next one, another side first each time."""
    replies: dict[str, list[ClientReply]] = {side.name: [] for side in sides}
    refusals: dict[str, str] = {}
    for number, messages in enumerate(requests):
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 1}
        post = Post(body={"messages": list(messages), **options})
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            if side.name in refusals:
                continue
            try:
                replies[side.name] += side.ask((post,), timeout_s=_TIMEOUT_S)
            except Refused as error:
                refusals[side.name] = f"request {number + 1}: {error}"
    return [
        SideTally(name=side.name, replies=tuple(replies[side.name]), refusal=refusals.get(side.name)) for side in sides
    ]


def main() -> int:
    """Play, and print a line for each server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", choices=MODELS, default="llama")
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--requests", type=int, default=14, help="of each session, from its beginning")
    parser.add_argument("--live", type=int, default=1)
    parser.add_argument("--divide", type=int, default=64, choices=(8, 16, 32, 64))
    parser.add_argument("--room", type=float, default=1.5)
    parser.add_argument("--total", action="store_true", help="our bound is the room alone, what runs included")
    parser.add_argument("--alone", action="store_true", help="ours, with and without a bound, beside no other")
    parser.add_argument("--vs", action="append", default=[], metavar="URL")
    given = parser.parse_args()
    sessions = [session[: given.requests] for session in islice(sessions_of(given.file), given.sessions)]
    words = 64 // given.divide
    requests = list(played(sessions, num_live=given.live, words_per_block=words))
    with model(given.layers) as path:
        prompts = _prompts(path, requests)
        oracle = Oracle()
        least: list[int] = []
        for prompt in prompts:
            least.append(oracle.cost(prompt))
            oracle.remember(prompt)
        footprint = outline_of(path, str(path), kv_bits=None).footprint
        longest = max(map(len, prompts))
        room = int(given.room * (longest * footprint.full + footprint.checkpoint))
        # What runs is part of our bound, and not of theirs.
        running = footprint.at(longest + _GROWTH)
        bound = room if given.total else room + running
        ours = RepriseSide(OURS, str(path), "--cache-bytes", str(bound))
        endless = RepriseSide(ENDLESS, str(path), "--cache-bytes", _NO_BOUND)
        sides: list[Side] = [ours, endless]
        if not given.alone:
            sides.append(_BoundedMlxLm(str(path), room))
            sides += [_BoundedMlxVlm(path, room)] if find_spec("mlx_vlm") is not None else []
        sides += [UrlSide(url) for url in given.vs]
        total = sum(map(len, prompts))
        print(
            f"{given.layers}: {len(requests)} requests of {len(sessions)} sessions, {given.live} at a time, lengths ÷ "
            f"{given.divide}; {total:,} prompt tokens, the longest {longest:,}; {room:,} bytes for prefixes, "
            f"{running:,} more for the longest that runs; our bound {bound:,}; oracle computes {sum(least):,}\n"
        )
        print(_HEADINGS)
        with started(sides):
            for tally in play(sides, requests):
                asked = prompts[: len(tally.replies)]
                print(tally.line(sum(least[: len(asked)]), sum(map(len, asked))))
            for side in (ours, endless):
                health = side.get("/health")
                held = {use: health[f"bytes_{use}"] for use in ("kv", "snapshots", "live")}
                print(
                    f"\n{side.name}: at most {health['bytes_live_most']:,} bytes beside the cache; now "
                    + ", ".join(f"{use} {nbytes:,}" for use, nbytes in held.items())
                )
    return 0


def _prompts(path: Path, requests: Sequence[Sequence[Message]]) -> list[Tokens]:
    """What the model reads of each request."""
    renderer = Renderer(load_text_model(str(path)))
    chats = (ChatRequest(messages=tuple(messages)) for messages in requests)
    return [np.asarray(renderer.render(chat, is_final=False).prompt.tokens) for chat in chats]


if __name__ == "__main__":
    raise SystemExit(main())
