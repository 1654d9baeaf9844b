"""Traces of requests, read as a stream: block hashes, token prompts, dialogues.

Nothing of a trace is kept but the request at hand, so a trace may be longer than the memory.
"""

import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from reprise.core.errors import BadRequest
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.lab.simulate import Granularity
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request

BLOCK_TOKENS = 512
"""Prompt tokens that one hash of a Mooncake trace stands for."""

_CHARACTERS = 4
"""Characters of a dialogue's text that make one pseudo-token."""

_LONGEST_LINE = 1 << 24
"""Characters of a first line that is looked at."""

MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, MemoryError)
"""What reading something raises that is JSON of another shape, or none: numbers too large and endless nesting, too."""


def read_trace(
    path: Path,
    *,
    granularity: Granularity = Granularity.TOKEN,
    block_length: int = BLOCK_TOKENS,
    num_at_once: int = 1,
    engine: str | None = None,
) -> Iterator[Request]:
    """The requests of a trace file in order; of a recording of several models, those of this `engine`.

    JSON lines with `hash_ids`, one for each `block_length` tokens (or `block_tokens`, where the line says so),
    `input_length` and perhaps `output_length` and `boundaries` (Mooncake, FAST'25; `reprise serve --record`), or with
    `tokens` (and perhaps `answer`, token ids, and `boundaries`, pairs of position and kind); or one JSON list of
    dialogues with `traj` or `messages` (tau-bench), of which `num_at_once` are under way together. Raises BadRequest
    with a sentence for anything else.
    """
    # What is not UTF-8 is replaced, and then no JSON of a request: so it is refused with its line.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        start = file.read(64).lstrip()
        file.seek(0)
        if start.startswith("["):
            try:
                dialogues = [_messages(dialogue) for dialogue in json.load(file)]
            except MALFORMED as error:
                needs = "each needs `traj` or `messages`, and each message a `role`"
                raise BadRequest(f"{path}: not a list of dialogues: {needs}.") from error
            yield from _in_turn(map(dialogue_requests, dialogues), num_at_once)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if engine is not None and fields.get("engine") != engine:
                    continue
                request = _request(fields, granularity, block_length)
            except MALFORMED as error:
                needs = f"expected `hash_ids` (one per {block_length} tokens) and `input_length`, or `tokens`"
                raise BadRequest(f"{path}:{number}: invalid request: {needs}.") from error
            yield request


def _in_turn(dialogues: Iterator[Iterator[Request]], num_at_once: int) -> Iterator[Request]:
    """A request of each of the open dialogues in turn; where one ends the next begins."""
    under_way = deque(islice(dialogues, num_at_once))
    while under_way:
        dialogue = under_way.popleft()
        request = next(dialogue, None)
        if request is not None:
            yield request
            under_way.append(dialogue)
        else:
            under_way.extend(islice(dialogues, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """A model of a recording (`reprise serve --record`). `sizes`: of its state; None if they are not written down."""

    engine: str | None
    """The name under which its prefix cache is known; None if the server had one model."""
    names: tuple[str, ...]
    num_requests: int
    sizes: Sizes | None


def recorded_models(path: Path) -> list[RecordedModel]:
    """The models of a trace that share no cache, in the order of their first requests. One in all other traces."""
    found: dict[str | None, RecordedModel] = {}
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in iter(lambda: file.readline(_LONGEST_LINE), ""):
            fields = _fields(line)
            engine = fields.get("engine")
            if engine is None and found:
                break
            known = found.get(engine)
            names = () if known is None else known.names
            found[engine] = RecordedModel(
                engine=engine,
                names=tuple(dict.fromkeys((*names, *([] if engine is None else [str(fields.get("model", engine))])))),
                num_requests=1 if known is None else known.num_requests + 1,
                sizes=_sizes(fields) if known is None else known.sizes,
            )
            if engine is None:
                break
    return list(found.values())


def _fields(line: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], fields) if isinstance(fields, dict) else {}


def _sizes(fields: Mapping[str, Any]) -> Sizes | None:
    try:
        return Sizes(full=max(1, int(fields["token_nbytes"])), snapshot=max(0, int(fields["snapshot_nbytes"])))
    except MALFORMED:
        return None


def _request(line: Mapping[str, Any], granularity: Granularity, block_length: int) -> Request:
    if "hash_ids" in line:
        return _from_blocks(line, granularity, block_length)
    tokens = as_tokens(line["tokens"])
    if len(tokens) == 0:
        raise ValueError("an empty prompt")
    boundaries = sorted(Boundary(int(at), BoundaryKind(kind)) for at, kind in line.get("boundaries", ()))
    if any(not 0 <= boundary.position <= len(tokens) for boundary in boundaries):
        raise ValueError("a boundary outside of the prompt")
    answer = as_tokens(line["answer"]) if "answer" in line else None
    prompt = Prompt(tokens=tokens, boundaries=tuple(boundaries))
    is_auxiliary = bool(line.get("is_side", False))
    return Request(
        prompt=prompt, num_tokens=len(tokens), shareable=len(tokens), answer=answer, is_auxiliary=is_auxiliary
    )


def _from_blocks(line: Mapping[str, Any], granularity: Granularity, block_length: int) -> Request:
    ids, num_tokens = line["hash_ids"], int(line["input_length"])
    block_length = int(line.get("block_tokens", block_length))
    if block_length <= 0:
        raise ValueError("a block of nothing")
    num_answered = int(line["output_length"]) if "output_length" in line else None
    if num_tokens <= 0 or len(ids) != -(-num_tokens // block_length):
        raise ValueError("as many hashes as blocks are needed")
    if num_answered is not None and num_answered < 0:
        raise ValueError("an answer of less than nothing")
    whole = num_tokens // block_length
    if granularity is Granularity.BLOCK:
        tokens, unit = block_tokens(ids, 1), block_length
    else:
        tokens, unit, whole = block_tokens(ids, block_length)[:num_tokens], 1, whole * block_length
    # The next turn has other tokens in the block that this prompt ends in.
    boundaries = [Boundary(whole, BoundaryKind.STABLE)] if whole > 0 else []
    if "boundaries" in line:
        boundaries = sorted(Boundary(int(at) // unit, BoundaryKind(kind)) for at, kind in line["boundaries"])
    if any(not 0 <= boundary.position <= len(tokens) for boundary in boundaries):
        raise ValueError("a boundary outside of the prompt")
    prompt = Prompt(tokens=tokens, boundaries=tuple(boundaries))
    shareable = whole if whole > 0 else len(tokens)
    return Request(
        prompt=prompt,
        num_tokens=num_tokens,
        shareable=shareable,
        unit=unit,
        block=block_length,
        num_answered=num_answered,
    )


def block_tokens(ids: Sequence[int], length: int) -> Tokens:
    """Pseudo-tokens for block hashes, `length` for each, that depend on the hash alone."""
    seeds = np.array([int(block) % (1 << 64) for block in ids], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    steps = np.arange(length, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = seeds[:, None] + steps[None, :]
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return as_tokens((mixed >> np.uint64(33)).astype(np.int32).reshape(-1))


def _messages(dialogue: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The (role, text) pairs of a dialogue."""
    messages: Sequence[Mapping[str, Any]] = dialogue["traj"] if "traj" in dialogue else dialogue["messages"]
    return [(str(message["role"]), _text(message)) for message in messages]


def dialogue_requests(messages: Sequence[tuple[str, str]]) -> Iterator[Request]:
    """The requests of one dialogue of (role, text): before each answer, all that stands before it."""
    parts: list[Tokens] = []
    length = 0
    system_at = 0
    for at, (role, text) in enumerate(messages):
        tokens = join_tokens(text_tokens(f"<{role}>"), text_tokens(text))
        if role == "assistant" and length > 0:
            marks = {Boundary(length, BoundaryKind.STABLE)}
            if 0 < system_at < length:
                marks.add(Boundary(system_at, BoundaryKind.SYSTEM))
            opening = text_tokens("<assistant>")
            prompt = Prompt(tokens=join_tokens(*parts, opening), boundaries=tuple(sorted(marks)))
            yield Request(prompt=prompt, num_tokens=len(prompt), shareable=len(prompt), answer=text_tokens(text))
        parts.append(tokens)
        length += len(tokens)
        if at == 0 and role == "system":
            system_at = length


def _text(message: Mapping[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return f"{message.get('content') or ''}{calls}"


def text_tokens(text: str) -> Tokens:
    """Pseudo-tokens of a text: one for every four characters."""
    pieces = (text[at : at + _CHARACTERS] for at in range(0, len(text), _CHARACTERS))
    return as_tokens([zlib.crc32(piece.encode()) & 0x7FFFFFFF for piece in pieces])
