"""Embeddings on the engine thread: inputs wait here and are computed in batches of similar length.

A pass is bounded in tokens and cut between layers, or between tokens where a model can be, so that other models'
streams wait for a piece of it and not for all. Vectors are kept by what they were made of: an exact repeat computes
nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from cachetools import LRUCache

from reprise.core.clock import Clock
from reprise.core.embedding import EmbeddingInput, EmbeddingJob, EmbeddingResult, Vectors
from reprise.core.errors import OutOfMemory, QueueFull, RepriseError, engine_failed
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.embedding import EmbeddingPass
from reprise.memory import Account, Memory

log = logging.getLogger("reprise.loop")

MOST_KEPT_NBYTES = 64 << 20
"""Of vectors of earlier inputs."""
MOST_TOKENS = 4096
"""Of one pass, padding included, where nobody else waits."""
_LEAST_TOKENS = 64
_WINDOW = 512
"""How many waiting inputs are searched for those that fit into a pass."""
_WAITS_FOR_ROOM_S = 60.0
"""How long an input waits for room that others have, who may always have it."""
_OVERHEAD_NBYTES = 200
"""What a kept vector takes beside its numbers."""


class VectorCache:
    """Vectors by namespace and input, least recently used first. Charged to `Account.EMBEDDINGS`."""

    def __init__(self, memory: Memory, *, most_nbytes: int = MOST_KEPT_NBYTES) -> None:
        self._memory = memory
        self._kept: LRUCache[tuple[str, bytes], Vectors] = LRUCache(most_nbytes, getsizeof=_kept_nbytes)

    @property
    def nbytes(self) -> int:
        return int(self._kept.currsize)

    def find(self, namespace: str, key: bytes) -> Vectors | None:
        """The vector of an earlier input."""
        return self._kept.get((namespace, key))

    def keep(self, namespace: str, key: bytes, vector: Vectors) -> None:
        """Keep a vector, in place of those that were used longest ago. One for which there is no room is not kept."""
        size = _kept_nbytes(vector)
        if (namespace, key) not in self._kept and size <= self._kept.maxsize and self._memory.fits(size):
            self._kept[namespace, key] = vector
            self._charge()

    def release_one(self) -> bool:
        """Drop the vector that was used longest ago. False if there is none."""
        if not self._kept:
            return False
        self._kept.popitem()
        self._charge()
        return True

    def clear(self, namespace: str | None = None) -> None:
        """Drop the vectors of a namespace, or all of them."""
        for each in [each for each in self._kept if namespace in (None, each[0])]:
            del self._kept[each]
        self._charge()

    def check(self) -> None:
        """AssertionError unless the account is right."""
        self._memory.check({Account.EMBEDDINGS: self.nbytes})

    def _charge(self) -> None:
        self._memory.measure(Account.EMBEDDINGS, self.nbytes)


def _kept_nbytes(vector: Vectors) -> int:
    return vector.nbytes + _OVERHEAD_NBYTES


@dataclass(slots=True, kw_only=True, eq=False)
class _RunningJob:
    """A job, and what it has so far."""

    job: EmbeddingJob
    answer: Future[EmbeddingResult]
    arrived_s: float
    vectors: Vectors
    missing: int
    """Inputs without a vector."""
    num_repeated: int = 0
    num_passes: int = 0
    started_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.answer.done()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WaitingInput:
    """One input, and the places that get its vector: also those of equal inputs."""

    input: EmbeddingInput
    key: bytes
    namespace: str
    places: list[tuple[_RunningJob, int]] = field(default_factory=list[tuple["_RunningJob", int]])

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return any(not running.is_over for running, _ in self.places)


class EmbeddingQueue:
    """The embedding jobs of one model, which has none unless it is an embedder."""

    def __init__(
        self,
        loaded: Callable[[], LoadedModel],
        memory: Memory,
        *,
        max_queue: int,
        stall_s: float,
        note: Callable[[dict[str, int]], None],
        clock: Clock,
    ) -> None:
        """`stall_s`: how long a piece of a pass may take beside other models. `note`: adds to the counters."""
        embedder = loaded().embedder
        self._width = 0 if embedder is None else embedder.num_dimensions
        self._loaded = loaded
        self._memory = memory
        self._max_queue = max_queue
        self._stall_s = stall_s
        self._note = note
        self._clock = clock
        self.kept = VectorCache(memory)
        self._jobs: dict[str, _RunningJob] = {}
        self._waiting: OrderedDict[tuple[str, bytes], _WaitingInput] = OrderedDict()
        self._pass: Iterator[Vectors | None] | None = None
        self._rows: list[_WaitingInput] = []
        self._num_alone = 0
        """So many of the inputs that wait longest are computed one by one: a pass over them together failed."""
        self._tokens_per_s: float | None = None
        self._pass_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_in_pass(self) -> int:
        """Jobs of which something is being computed."""
        return len({id(running) for each in self._rows for running, _ in each.places if not running.is_over})

    @property
    def waits_since_s(self) -> float | None:
        """When the longest-waiting job arrived; None: no job waits."""
        return min((running.arrived_s for running in self._jobs.values()), default=None)

    def add(self, job: EmbeddingJob, answer: Future[EmbeddingResult], arrived_s: float) -> None:
        """Queue a job, whose `answer` is resolved with its vectors, or with the error."""
        if len(self._jobs) >= self._max_queue:
            self.drop_unwanted()
        if len(self._jobs) >= self._max_queue:
            _fail(answer, QueueFull(f"{len(self._jobs)} requests for embeddings are waiting. Try again in a moment."))
            return
        vectors = np.zeros((len(job.inputs), self._width), dtype=np.float32)
        running = _RunningJob(job=job, answer=answer, arrived_s=arrived_s, vectors=vectors, missing=len(job.inputs))
        self._jobs[job.id] = running
        self._note({"num_requests": 1, "num_prompt": job.num_tokens})
        for place, each in enumerate(job.inputs):
            key = key_of(each)
            found = self.kept.find(job.namespace, key)
            if found is not None:
                self._give(running, place, found, num_repeated=len(each.tokens))
                continue
            same = self._waiting.get((job.namespace, key))
            if same is None:
                same = self._waiting[job.namespace, key] = _WaitingInput(input=each, key=key, namespace=job.namespace)
            same.places.append((running, place))
        self._finish_complete()

    def step(self, *, num_others: int, is_closed: bool = False) -> None:
        """Compute for as long as others may wait, at least a piece of a pass. `is_closed`: no pass is begun."""
        since_s = self._clock()
        self.drop_unwanted()
        if self._pass is None and (is_closed or not self._begin(num_others)):
            return
        stall_s = self._stall_s / (1 + num_others)
        try:
            while self._pass is not None:
                vectors = next(self._pass)
                if vectors is not None:
                    self._pass_s += self._clock() - since_s
                    self._end(vectors)
                elif num_others > 0 and self._clock() - since_s >= stall_s:
                    self._pass_s += self._clock() - since_s
                    return
        except Exception as error:
            log.exception("a pass over embeddings failed")
            self._fail_rows(error)

    def fail_all(self, error: RepriseError) -> None:
        """Fail all jobs."""
        self._pass, self._rows = None, []
        self._waiting.clear()
        for running in list(self._jobs.values()):
            self._end_job(running, error)

    def clear(self, namespace: str | None = None) -> None:
        """Drop the kept vectors of a namespace, or of all."""
        self.kept.clear(namespace)

    def check(self) -> None:
        """AssertionError unless accounts and counts are right."""
        self.kept.check()
        waiting = [place for each in (*self._waiting.values(), *self._rows) for place in each.places]
        for running in self._jobs.values():
            assert running.missing == sum(each is running for each, _ in waiting), running.job.id

    def drop_unwanted(self) -> None:
        """Forget jobs whose clients have disconnected, and the pass if it was for these alone."""
        over = [running for running in self._jobs.values() if running.is_over]
        if not over:
            return
        for running in over:
            del self._jobs[running.job.id]
            self._note({"num_cancelled": 1})
        for key in [key for key, each in self._waiting.items() if not each.is_wanted]:
            del self._waiting[key]
        if self._pass is not None and not any(each.is_wanted for each in self._rows):
            self._pass, self._rows = None, []

    def _begin(self, num_others: int) -> bool:
        """Begin a pass over the input that waits longest and others of like length. False if there is none to begin."""
        if not self._waiting:
            return False
        most = self._most_tokens(num_others)
        first, *others = list(self._waiting.values())[: 1 if self._num_alone > 0 else _WINDOW]
        self._num_alone = max(0, self._num_alone - 1)
        length, rows = len(first.input.tokens), [first]
        for each in sorted(others, key=lambda each: abs(len(each.input.tokens) - length)):
            longest = max(length, len(each.input.tokens))
            if longest * (len(rows) + 1) > most:
                break
            length = longest
            rows.append(each)
        embedding = self._pass_over(rows, most, num_others)
        # Fewer at once, before caches and idle models go for room that there is not.
        while len(rows) > 1 and embedding.nbytes > self._most_room:
            rows = rows[: len(rows) // 2]
            embedding = self._pass_over(rows, most, num_others)
        waited_s = self._clock() - min(running.arrived_s for running, _ in first.places)
        if num_others > 0 and embedding.nbytes > self._most_room and waited_s < _WAITS_FOR_ROOM_S:
            return False  # There will be room when the others have answered.
        for each in rows:
            del self._waiting[each.namespace, each.key]
        self._rows, self._pass_s = rows, 0.0
        if not self._memory.reserve(embedding.nbytes):
            self._fail_rows(
                OutOfMemory(f"There is no room for a pass over {length} tokens. Send shorter texts, or raise --memory.")
            )
            return False
        now_s = self._clock()
        for running in {id(running): running for each in rows for running, _ in each.places}.values():
            running.num_passes += 1
            running.started_s = now_s if running.started_s is None else running.started_s
        self._pass = embedding.run()
        return True

    def _pass_over(self, rows: Sequence[_WaitingInput], most: int, num_others: int) -> EmbeddingPass:
        return EmbeddingPass(self._loaded(), [each.input for each in rows], chunk=most, evaluates=num_others > 0)

    @property
    def _most_room(self) -> float:
        """Bytes that a pass may have at most, if all went that can be evicted."""
        memory = self._memory
        return float("inf") if memory.budget is None else memory.budget - memory.kept_nbytes - memory.kept_by_others

    def _most_tokens(self, num_others: int) -> int:
        if num_others == 0 or self._tokens_per_s is None:
            return MOST_TOKENS if num_others == 0 else _LEAST_TOKENS
        return int(min(MOST_TOKENS, max(_LEAST_TOKENS, self._tokens_per_s * self._stall_s / (1 + num_others))))

    def _end(self, vectors: Vectors) -> None:
        rows, self._rows, self._pass = self._rows, [], None
        num = sum(len(each.input.tokens) for each in rows)
        if self._pass_s > 0:
            speed = num / self._pass_s
            self._tokens_per_s = speed if self._tokens_per_s is None else 0.7 * self._tokens_per_s + 0.3 * speed
        for each, vector in zip(rows, vectors, strict=True):
            self.kept.keep(each.namespace, each.key, vector.copy())
            for number, (running, place) in enumerate(each.places):
                # Who asks for the same again, at the same time, has it for nothing.
                self._give(running, place, vector, num_repeated=0 if number == 0 else len(each.input.tokens))
        self._finish_complete()

    def _give(self, running: _RunningJob, place: int, vector: Vectors, *, num_repeated: int) -> None:
        running.vectors[place] = vector
        running.missing -= 1
        running.num_repeated += num_repeated
        num = len(running.job.inputs[place].tokens)
        self._note({"num_reused": num_repeated, "num_prefilled": num - num_repeated})

    def _finish_complete(self) -> None:
        now_s = self._clock()
        for running in [running for running in self._jobs.values() if running.missing == 0]:
            del self._jobs[running.job.id]
            started_s = now_s if running.started_s is None else running.started_s
            result = EmbeddingResult(
                vectors=running.vectors,
                num_tokens=running.job.num_tokens,
                num_repeated=running.num_repeated,
                num_passes=running.num_passes,
                queued_s=started_s - running.arrived_s,
                total_s=now_s - running.arrived_s,
            )
            self._note({"num_finished": 1})
            with suppress(InvalidStateError):
                running.answer.set_result(result)

    def _fail_rows(self, error: Exception) -> None:
        """Fail the input of the pass; several are tried again one by one, so that none fails for another."""
        shown = error if isinstance(error, RepriseError) else engine_failed("The embedding failed", error)
        rows, self._rows, self._pass = self._rows, [], None
        if len(rows) > 1:
            for each in reversed(rows):
                # The same input may have arrived again since.
                again = self._waiting.setdefault((each.namespace, each.key), each)
                if again is not each:
                    again.places.extend(each.places)
                self._waiting.move_to_end((each.namespace, each.key), last=False)
            self._num_alone = len(rows)
            return
        for running in {id(running): running for each in rows for running, _ in each.places}.values():
            self._end_job(running, shown)

    def _end_job(self, running: _RunningJob, error: RepriseError) -> None:
        if self._jobs.pop(running.job.id, None) is not None:
            self._note({"num_failed": 1})
        for key, each in list(self._waiting.items()):
            each.places[:] = [place for place in each.places if place[0] is not running]
            if not each.places:
                del self._waiting[key]
        _fail(running.answer, error)


def key_of(given: EmbeddingInput) -> bytes:
    """What a vector is a function of, beside the model."""
    digest = hashlib.blake2b(given.tokens.tobytes(), digest_size=16)
    digest.update(str(given.num_first).encode())
    return digest.digest()


def _fail(answer: Future[EmbeddingResult], error: RepriseError) -> None:
    with suppress(InvalidStateError):
        answer.set_exception(error)
