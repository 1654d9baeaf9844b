"""Recorded sessions of coding agents (the format of kv-cache-tester), played side by side.

A session is a JSON object with `requests`. Each has the seconds since the session's start (`t`), the lengths of prompt
and answer (`in`, `out`), and `hash_ids`: one number for each whole block of the prompt, with runs written as
``[first, last]``. Equal numbers mean an equal prefix up to and with that block: within one session, or within all of
them where `hash_id_scope` is `global`. A request of type `subagent` has `requests` too, whose times count from its
start.

Otherwise what two sessions share is not recorded. Those of one model whose tools take equally many tokens
(`tool_tokens`) are taken to begin with the same tools, and with the same system prompt if that is equally long, too
(`system_tokens`).
"""

import gzip
import hashlib
import heapq
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import numpy.typing as npt

from reprise.core.errors import BadRequest
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens, common_prefix
from reprise.lab.simulate.traces import MALFORMED
from reprise.replay.request import Change, Request

LONGEST_PAUSE_S = 20 * 60
"""A longer pause is cut to this: it stands for a person who left."""

_START_CHARACTERS = 1 << 12
_SUFFIXES = (".json", ".jsonl", ".gz")


def holds_sessions(path: Path) -> bool:
    """Whether this is a folder of sessions, or a file of them rather than a trace of requests (never compressed)."""
    if path.is_dir() or path.suffix == ".gz":
        return True
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            start = file.read(_START_CHARACTERS).split('"requests"')[0]
    except OSError:
        return False
    return '"hash_id_scope"' in start or ('"block_size"' in start and '"hash_ids"' not in start)


def read_sessions(path: Path, *, num_live: int = 1) -> Iterator[Request]:
    """The requests of all sessions in the order of their times, `num_live` sessions side by side.

    When one ends, the next begins. Pauses longer than `LONGEST_PAUSE_S` are cut to that. `path`: a file with a session
    on each line, a file that is one session, or a folder of those (`.json`, `.jsonl`); files may be gzipped (`.gz`).
    Raises BadRequest.
    """
    waiting = _sessions(path)
    under_way: list[tuple[float, int, float, Request, Iterator[Request]]] = []
    numbers = count()

    def go_on(session: Iterator[Request], start_s: float, end_s: float) -> None:
        """Queue the next request of this session, or the first of the next one, which starts at `end_s`."""
        upcoming = next(session, None)
        if upcoming is None:
            session, start_s = next(waiting, iter(())), end_s
            upcoming = next(session, None)
        if upcoming is not None:
            heapq.heappush(under_way, (start_s + upcoming.at_s, next(numbers), start_s, upcoming, session))

    for session in list(islice(waiting, num_live)):
        go_on(session, 0.0, 0.0)
    while under_way:
        at_s, _, start_s, played, session = heapq.heappop(under_way)
        yield replace(played, at_s=at_s)
        go_on(session, start_s, at_s + played.took_s)


def _sessions(path: Path) -> Iterator[Iterator[Request]]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        # Beside sessions there are notes about them, and what systems hide there.
        if file != path and (file.suffix not in _SUFFIXES or file.name.startswith(".")):
            continue
        number = 1
        try:
            with _opened(file) as opened:
                # One object a line, or one object over many lines.
                first = opened.readline()
                if not _is_json(first):
                    first += opened.read()
                for text in chain((first,), opened):
                    if text.strip():
                        yield iter(_requests_of(json.loads(text)))
                    number += 1
        except (*MALFORMED, OSError, EOFError, zlib.error) as error:
            needs = "expected `requests`, each with `t`, `in`, `out` and `hash_ids`"
            raise BadRequest(f"{file}:{number}: not a recorded session: {needs}.") from error


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig"))
    return path.open(encoding="utf-8-sig")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _requests_of(session: Mapping[str, Any]) -> list[Request]:
    """The requests of a session in the order of their times, with long pauses cut."""
    block = int(session.get("block_size", 64))
    records: Sequence[Mapping[str, Any]] = session["requests"]
    own = [record for record in records if record.get("type") != "subagent"]
    streams = [_AgentLine(records=own, about=session, start_s=0.0)]
    for record in records:
        if record.get("type") == "subagent":
            streams.append(_AgentLine(records=record["requests"], about=record, start_s=float(record["t"])))
    name = str(session.get("id", ""))
    is_global = session.get("hash_id_scope") == "global"
    timed = [
        replace(one, agent=f"{name} {number}")
        for number, stream in enumerate(streams)
        for one in stream.requests(name, block, is_global=is_global)
    ]
    timed.sort(key=lambda one: one.at_s)
    at_s = 0.0
    played: list[Request] = []
    for before, one in pairwise((None, *timed)):
        assert one is not None
        at_s += 0.0 if before is None else min(one.at_s - before.at_s, LONGEST_PAUSE_S)
        played.append(replace(one, at_s=at_s))
    return played


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgentLine:
    """The requests of one agent. `about`: the record with the sizes of its tools and system prompt."""

    records: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]
    start_s: float

    def requests(self, session: str, block: int, *, is_global: bool) -> list[Request]:
        """`is_global`: the hashes tell what sessions share; they need not be taken to begin alike."""
        prompts = [_expanded(record["hash_ids"], int(record["in"]) // block) for record in self.records]
        if not prompts:
            return []
        # What the first prompt begins with is shared with other sessions, wherever its numbers occur.
        models = ",".join(map(str, self.about.get("models", ())))
        num_tools = int(self.about.get("tool_tokens", 0))
        num_system = int(self.about.get("system_tokens", 0))
        shared: dict[int, int] = {}
        for at, number in enumerate(prompts[0][: (num_tools + num_system) // block].tolist()):
            size = f"{num_tools}" if at < num_tools // block else f"{num_tools} {num_system}"
            shared[number] = _seed(f"{models} {size} {at}")
        seed, seeds = (_seed(""), {}) if is_global else (_seed(session), shared)
        tokens = [_tokens(prompt, seed, seeds) for prompt in prompts]
        found: list[Request] = []
        for at, record in enumerate(self.records):
            before = tokens[at - 1] if at > 0 else None
            after = tokens[at + 1] if at + 1 < len(tokens) else None
            begins_alike = common_prefix(tokens[at], tokens[0])
            started_s = self.start_s + float(record["t"])
            took_s = float(record.get("api_time") or 0.0)
            if not (isfinite(started_s) and isfinite(took_s)):
                raise ValueError("a time that never comes")
            request = _request(
                record,
                tokens[at],
                before=before,
                new_before=common_prefix(tokens[at - 2], tokens[at - 1]) if at > 1 else 0,
                after=after,
                system_at=len(shared) if begins_alike >= len(shared) else 0,
                block=block,
                name=f"{session} {at}",
            )
            found.append(replace(request, at_s=started_s, took_s=took_s, agent=session))
        return found


def _request(
    record: Mapping[str, Any],
    tokens: Tokens,
    *,
    before: Tokens | None,
    new_before: int,
    after: Tokens | None,
    system_at: int,
    block: int,
    name: str,
) -> Request:
    num_tokens, num_answered = int(record["in"]), int(record["out"])
    if num_tokens <= 0 or num_answered < 0:
        raise ValueError("a prompt or an answer of less than nothing")
    if len(tokens) == 0:
        tokens = _tokens(np.zeros(1, dtype=np.int64), _seed(name), {})
    # The next prompt shows where it parts from this one; if in what was stored before, the client changed its history.
    known = 0 if before is None else common_prefix(before, tokens)
    parts_at = len(tokens) if after is None else common_prefix(tokens, after)
    stable_at = parts_at if parts_at > known else len(tokens)
    num_blocks = max(0, (num_tokens + num_answered) // block - len(tokens))
    if after is not None and parts_at == len(tokens) and len(after) >= len(tokens) + num_blocks:
        answer = as_tokens(after[len(tokens) : len(tokens) + num_blocks])
    else:
        answer = _tokens(np.arange(num_blocks, dtype=np.int64), _seed(f"{name} answer"), {})
    stop = record.get("stop") or None
    boundaries = {Boundary(stable_at, BoundaryKind.STABLE)}
    if 0 < system_at < stable_at:
        boundaries.add(Boundary(system_at, BoundaryKind.SYSTEM))
    prompt = Prompt(tokens=tokens, boundaries=tuple(sorted(boundaries)))
    return Request(
        prompt=prompt,
        num_tokens=num_tokens,
        shareable=len(tokens),
        unit=block,
        block=block,
        answer=answer,
        num_answered=num_answered,
        calls_tool=None if stop is None else stop == "tool_use",
        change=_change(tokens, before, new_before),
    )


def _change(tokens: Tokens, before: Tokens | None, new_before: int) -> Change:
    """`new_before`: where the new part of the prompt before it began."""
    if before is None:
        return Change.FIRST
    shared = common_prefix(before, tokens)
    if shared == len(before):
        return Change.GROWN
    if len(tokens) < len(before):
        is_summary = 2 * (len(tokens) - shared) < len(before) - shared
        return Change.COMPACTED if is_summary else Change.CLEARED
    return Change.END_EDITED if shared >= new_before else Change.EARLIER_EDITED


def _expanded(numbers: Sequence[int | Sequence[int]], num_blocks: int) -> npt.NDArray[np.int64]:
    runs = [(int(n), int(n)) if isinstance(n, int) else (int(n[0]), int(n[1])) for n in numbers]
    # Counted before they are written out: a run may name more than memory holds.
    if sum(max(0, last + 1 - first) for first, last in runs) != num_blocks:
        raise ValueError("as many hashes as whole blocks are needed")
    parts = [np.arange(first, last + 1, dtype=np.int64) for first, last in runs]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _tokens(numbers: npt.NDArray[np.int64], seed: int, shared: Mapping[int, int]) -> Tokens:
    """One pseudo-token for each number, of this session alone; those in `shared` have seeds of their own."""
    values = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for at in np.flatnonzero(np.isin(numbers, list(shared))) if shared else ():
        values[at] = np.uint64(shared[int(numbers[at])])
    mixed = (values ^ (values >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return as_tokens((mixed >> np.uint64(33)).astype(np.int32))


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
