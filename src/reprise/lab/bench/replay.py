"""Recorded requests (`reprise serve --record`, agent sessions) sent again: at their times, or as fast as possible."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from reprise.lab.bench.client import ClientReply, Post, Refused
from reprise.lab.bench.results import Run
from reprise.lab.bench.run import about_model, records_of
from reprise.lab.bench.sides import BenchFailed, Side, started
from reprise.lab.bench.words import WORDS
from reprise.lab.simulate.sessions import read_sessions
from reprise.lab.simulate.traces import block_tokens

NAME = "replay"
_NEEDED = {"arrived_s", "took_s", "input_length", "hash_ids", "block_tokens"}
_MOST_AT_ONCE = 64
_LEAST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One HTTP request of a recording, `at_s` seconds after the first, which took `took_s`. `path` and `body`: None
    where no text was recorded; then `line` says how long the prompt was, and of which blocks."""

    at_s: float
    took_s: float
    line: Mapping[str, Any]
    path: str | None
    body: Mapping[str, Any] | None

    @property
    def ended_s(self) -> float:
        return self.at_s + self.took_s


def read_recording(file: Path) -> tuple[list[RecordedCall], int]:
    """The calls in the order in which they arrived, and how many lines were dropped. Raises BenchFailed."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFailed(f"Cannot read {file}: {error}.") from error
    found: list[dict[str, Any]] = []
    for number, text in enumerate(lines, start=1):
        try:
            line = cast(dict[str, Any], json.loads(text))
            if not line.keys() >= _NEEDED:
                raise ValueError(text)
        except (ValueError, AttributeError) as error:
            raise BenchFailed(f"{file}:{number}: not a line of `reprise serve --record`.") from error
        found.append(line)
    if not found:
        raise BenchFailed(f"{file} contains no requests.")
    found.sort(key=lambda line: line["arrived_s"])
    first_s = found[0]["arrived_s"]
    calls: list[RecordedCall] = []
    # Lines of one HTTP request have one number and one time: its body is sent once.
    for _, group in groupby(found, key=lambda line: (line["arrived_s"], line.get("call"))):
        same = list(group)
        for line in same if same[0].get("body") is None else same[:1]:
            calls.append(
                RecordedCall(
                    at_s=line["arrived_s"] - first_s,
                    took_s=max(other["took_s"] for other in same),
                    line=line,
                    path=line.get("path"),
                    body=line.get("body"),
                )
            )
    return calls, sum(line.get("dropped", 0) for line in found)


def calls_of_sessions(path: Path, *, num_live: int) -> list[RecordedCall]:
    """The calls of recorded agent sessions, `num_live` at a time, in the order of their times. Raises BadRequest."""
    return [
        RecordedCall(
            at_s=request.at_s,
            took_s=request.took_s,
            line={
                # The pseudo-tokens tell the blocks of all sessions apart.
                "hash_ids": request.prompt.tokens.tolist(),
                "block_tokens": request.block,
                "input_length": request.num_tokens,
                "output_length": request.num_answered,
            },
            path=None,
            body=None,
        )
        for request in read_sessions(path, num_live=num_live)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayedCall:
    """An answer, and why the rest of its prompt was computed."""

    reply: ClientReply
    reason: str


@dataclass(slots=True, eq=False)
class ReplayBench:
    """A recording that is sent to every side, one after the other."""

    calls: Sequence[RecordedCall]
    sides: Sequence[Side]
    minutes: float
    is_fast: bool
    tell: Callable[[str], None]
    runs: list[Run] = field(default_factory=list[Run])
    notes: list[str] = field(default_factory=list[str])
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict[str, list[tuple[float, int]]])
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    _posts: list[Post] = field(default_factory=list[Post])

    def hold(self) -> None:
        """Start the servers one at a time, and send them the same calls. Raises BenchFailed."""
        began_s = time.perf_counter()
        num = len(self.calls)
        for number, side in enumerate(self.sides, start=1):
            self.tell(f"starting {side.name}")
            end_s = began_s + 60 * self.minutes * number / len(self.sides)
            with started((side,)) as sampler:
                if number == 1:
                    self.about = about_model(side)
                    self._posts = _posts(self.calls, side)
                answers, refused = self._send_all(side, num, end_s=end_s)
                # The first side says how many there is time for.
                num = len(answers) if number == 1 else num
                self._note(side, answers, refused, num)
            self.memory |= sampler.samples
        if num < len(self.calls):
            self.notes.append(
                f"{num} of {len(self.calls)} calls were replayed before the time was up. Raise --minutes."
            )

    def _note(self, side: Side, answers: "Sequence[_ReplayedCall | None]", refused: Sequence[str], num: int) -> None:
        if not any(answers):
            why = refused[0] if refused else "the time was up"
            self.runs.append(Run(workload=NAME, repeat=0, side=side.name, waves=(), refusal=why))
            return
        if refused:
            self.notes.append(f"{side.name} refused {len(refused)} of {num} calls, the first: {refused[0]}")
        waves = tuple((answer.reply,) for answer in answers if answer is not None)
        reasons = tuple(answer.reason for answer in answers if answer is not None) if side.is_ours else ()
        self.runs.append(Run(workload=NAME, repeat=0, side=side.name, waves=waves, reasons=reasons))

    def _send_all(self, side: Side, num: int, *, end_s: float) -> tuple[list[_ReplayedCall | None], list[str]]:
        """An answer for each call that was sent, None where it was refused; and the refusals."""
        began_s = time.perf_counter()
        refused: list[str] = []

        def ask(post: Post) -> _ReplayedCall | None:
            left_s = max(_LEAST_TIMEOUT_S, end_s - time.perf_counter() + _LEAST_TIMEOUT_S)
            try:
                (reply,) = side.ask((post,), timeout_s=left_s)
            except Refused as error:
                refused.append(str(error))
                return None
            (record,) = records_of(side, (reply,))
            return _ReplayedCall(reply=_counted(reply, record), reason=str(record.get("reason", "")))

        sent: list[Future[_ReplayedCall | None]] = []
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            for index, call in enumerate(self.calls[:num]):
                if self.is_fast:
                    # What had ended before this call came is waited for: it may go on from there.
                    before = (other.ended_s <= call.at_s for other in self.calls[:index])
                    wait([future for future, is_before in zip(sent, before, strict=True) if is_before])
                else:
                    time.sleep(max(0.0, min(began_s + call.at_s, end_s) - time.perf_counter()))
                if time.perf_counter() >= end_s:
                    break
                self.tell(f"{side.name}: call {index + 1} of {num}")
                sent.append(pool.submit(ask, self._posts[index]))
        return [future.result() for future in sent], refused


def _posts(calls: Sequence[RecordedCall], side: Side) -> list[Post]:
    """The calls' bodies, or where none were recorded prompts of the same length that share what those shared."""
    ids: list[int] = []
    if any(call.body is None for call in calls):
        ids = sorted(set(_token_ids(side)))
    return [_post(call, ids) for call in calls]


def _token_ids(side: Side) -> Iterator[int]:
    """Some of the model's plain tokens."""
    told = side.post("/tokenize", {"prompt": " ".join(WORDS), "add_special_tokens": False})
    if "tokens" not in told:
        raise BenchFailed(f"{side.name} does not report its token ids, which a recording without bodies needs.")
    yield from told["tokens"]


def _post(call: RecordedCall, ids: Sequence[int]) -> Post:
    if call.body is not None and call.path is not None:
        body = dict(call.body)
        if call.path.endswith("/completions"):
            # What the recorded server's model was called means nothing here.
            body.pop("model", None)
            if body.get("stream") is True:
                body["stream_options"] = {"include_usage": True}
        return Post(path=call.path, body=body)
    line = call.line
    hashes: Sequence[int] = line["hash_ids"]
    tokens = block_tokens(hashes, int(line["block_tokens"]))[: int(line["input_length"])]
    num_choices = max(1, int(line.get("choices", 1)))
    body = {
        "prompt": [ids[int(token) % len(ids)] for token in tokens],
        "max_tokens": max(1, int(line.get("output_length", 1)) // num_choices),
        "n": num_choices,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Post(path="/v1/completions", body=body)


def _counted(reply: ClientReply, record: Mapping[str, Any]) -> ClientReply:
    """The reply with the server's own counts, where its API's answer has none."""
    if reply.num_computed is not None or "prompt_tokens" not in record:
        return reply
    return replace(
        reply,
        num_prompt=record["prompt_tokens"],
        num_cached=record["reused"],
        num_generated=record["generated"],
    )
