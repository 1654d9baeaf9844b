"""The answer to one request on its way: the events of its jobs, as they come.

They come from the engine thread to the event loop in order, without blocking the one or flooding the other.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from reprise.api.http.limits import Limits
from reprise.api.service.exchange import (
    AnswerDelta,
    AnswerEnd,
    Began,
    EndReason,
    Record,
    ReplyEvent,
    ServiceRequest,
    StillWaiting,
    Usage,
    Used,
)
from reprise.chat.answer import Answer, Delta, ToolCallDelta
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.templates.rendered import Rendered
from reprise.core.backend import Backend
from reprise.core.errors import EngineFailed, RepriseError, RequestCancelled
from reprise.core.events import Event, Finished, FinishReason, Progress, Sampled, Scored, Started
from reprise.core.outcome import Outcome


class LoopClock:
    """Seconds that only go forward, and waiting by them."""

    def now_s(self) -> float:
        return time.monotonic()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when the event is set; after so much time it is."""
        # A timeout of asyncio's own would cost as much again as all else that is done for a token here.
        timer = asyncio.get_running_loop().call_later(timeout_s, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()


class Inbox:
    """The events of one request's jobs, for one reader on the event loop.

    A reader that stands still does not hold memory without bound: when `limit` events wait, `on_overflow` is called
    once (on the engine thread) and further tokens are dropped; `has_overflowed` says so.
    """

    def __init__(self, *, limit: int, on_overflow: Callable[[], None], clock: LoopClock | None = None) -> None:
        self._clock = LoopClock() if clock is None else clock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._on_overflow = on_overflow
        self.has_overflowed = False

    @property
    def is_empty(self) -> bool:
        """Whether the reader has to wait for the next event."""
        return not self._waiting

    def sink(self, choice: int) -> Callable[[Event], None]:
        """Where the job of this choice puts its events. Safe on any thread; never blocks."""
        return partial(self._put, choice)

    def _put(self, choice: int, event: Event) -> None:
        if isinstance(event, Sampled) and len(self._waiting) >= self._limit:
            if not self.has_overflowed:
                self.has_overflowed = True
                self._on_overflow()
            return
        self._waiting.append((choice, event))
        # The reader clears the flag before it looks at the queue, so a flag that is set means that it will look again.
        if not self._arrived.is_set():
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                # The loop is closed: nobody will read this any more.
                self._waiting.clear()

    async def get(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event and the choice it belongs to, or None if nothing came for `timeout_s` seconds."""
        due_s = self._clock.now_s() + timeout_s
        # The flag may stand for an event that was read already, so one look is not enough.
        while not self._waiting:
            self._arrived.clear()
            left_s = due_s - self._clock.now_s()
            if self._waiting or left_s <= 0:
                break
            await self._clock.wait(self._arrived, left_s)
        return self._waiting.popleft() if self._waiting else None


EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class PrefillProgress:
    """Says when a line is due."""

    request_id: str
    since_s: float = field(default_factory=time.monotonic)
    """When the prefill began, or when somebody last heard of it."""
    position: int = 0
    """Where it stood then."""

    def line(self, *, position: int, total: int, now_s: float) -> str | None:
        """What to log now that `position` of `total` tokens are computed; None before it is time, and at the end."""
        if position <= self.position or now_s - self.since_s < EVERY_S or position >= total:
            return None
        rate = (position - self.position) / (now_s - self.since_s)
        self.since_s, self.position = now_s, position
        left_s = (total - position) / rate
        share = 100 * position // total
        return (
            f"{self.request_id}: prefilled {position} of {total} tokens ({share} %), {rate:.0f} tokens/s, "
            f"about {left_s:.0f} s left"
        )

    def hear(self, event: Progress) -> None:
        """Log that line, if it is due by now."""
        line = self.line(position=event.position, total=event.total, now_s=time.monotonic())
        if line is not None:
            log.info("%s", line)

    def restart(self, *, position: int, now_s: float) -> None:
        """The prefill begins at `position`."""
        self.since_s, self.position = now_s, position


log = logging.getLogger(__name__)


class Choice:
    """The answer number `index` to a request: the engine's events in, the reply's events out. No I/O.

    `tokens` is everything sampled, stop token included; `outcome` is set at the end.
    `wants_stop` turns true when the answer is complete before the engine knows: after the first tool call, where only
    one is allowed. The job is then to be cancelled, and its end counts as a stop. Where log-probabilities of the prompt
    are wanted, the token that ended the answer is given with its own, too.
    """

    def __init__(self, request: ServiceRequest, index: int, parser: AnswerParser) -> None:
        self.index = index
        self.job_id = request.id if request.num_choices == 1 else f"{request.id}-{index}"
        self.tokens: list[int] = []
        self.outcome: Outcome | None = None
        self.wants_stop = False
        self.parser = parser
        self._wants_logprobs = request.sampling.logprobs is not None
        self._allows_parallel_calls = request.allows_parallel_calls
        self._reports_end = request.prompt_logprobs is not None
        # What is not sampled.
        self._done_as = EndReason.LENGTH if request.max_tokens == 0 else EndReason.STOP
        self._pending_logprobs: list[Sampled] = []
        self._first_call: int | None = None

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    def take(self, event: Event) -> Sequence[ReplyEvent]:
        """What the event means for the client. Raises the error of a job that failed or was cancelled."""
        match event:
            case Started():
                return (Began(choice=self.index, num_cached=event.num_reused, num_prompt=event.total),)
            case Progress():
                return ()
            case Scored():
                return (AnswerDelta(choice=self.index, deltas=(), prompt=event.tokens),)
            case Sampled():
                return self._take_token(event)
            case Finished():
                return self._finish(event)

    def _take_token(self, event: Sampled) -> Sequence[ReplyEvent]:
        if self.wants_stop:
            return ()
        self.tokens.append(event.token)
        if self._wants_logprobs and (self._reports_end or not event.is_stop):
            self._pending_logprobs.append(event)
        deltas = self._piece(self.parser.feed(event.token, is_stop=event.is_stop))
        if not self._allows_parallel_calls and self.parser.num_calls_begun > 1:
            # A call that is held until it is whole need not be waited for.
            self.wants_stop = True
        return deltas

    def _piece(self, deltas: Sequence[Delta], *, is_last: bool = False) -> Sequence[ReplyEvent]:
        allowed = tuple(delta for delta in deltas if self._is_allowed(delta))
        if not allowed and not (is_last and self._pending_logprobs):
            return ()
        tokens = tuple(self._pending_logprobs)
        self._pending_logprobs.clear()
        return (AnswerDelta(choice=self.index, deltas=allowed, tokens=tokens),)

    def _is_allowed(self, delta: Delta) -> bool:
        if self._allows_parallel_calls or not isinstance(delta, ToolCallDelta):
            return not self.wants_stop
        if self._first_call is None:
            self._first_call = delta.index
        if delta.index != self._first_call:
            self.wants_stop = True
        return not self.wants_stop

    def _finish(self, event: Finished) -> Sequence[ReplyEvent]:
        self.outcome = event.outcome
        if event.reason is FinishReason.FAILED:
            raise event.error or EngineFailed("The model failed on this request. The server's log says why.")
        if event.reason is FinishReason.CANCELLED and not self.wants_stop:
            raise RequestCancelled("The request was cancelled.")
        rest = self._piece(self.parser.finish(), is_last=True)
        answer = self.answer
        is_cut = any(not call.is_whole for call in answer.tool_calls) or self.parser.is_call_cut
        if event.reason is FinishReason.DONE:
            reason = self._done_as
        elif event.reason is FinishReason.LENGTH and (is_cut or not answer.tool_calls):
            reason = EndReason.LENGTH
        elif answer.tool_calls:
            # Also one that turned out malformed when it had been streamed: the client has it, and answers it.
            reason = EndReason.TOOL_CALLS
        else:
            reason = EndReason.STOP
        ended = AnswerEnd(choice=self.index, reason=reason, answer=answer, outcome=event.outcome, stop=self.parser.stop)
        return (*rest, ended)

    @property
    def answer(self) -> Answer:
        """The answer as the client gets it: whole once the job has finished."""
        answer = self.parser.answer
        if self._allows_parallel_calls or len(answer.tool_calls) <= 1:
            return answer
        return Answer(content=answer.content, reasoning=answer.reasoning, tool_calls=answer.tool_calls[:1])


_TURN_S = 0.01
"""For one answer's events on the event loop, before others have theirs."""


class ReplyHost(Protocol):
    """The service that a reply belongs to."""

    async def learn(self, reply: "Reply", choice: Choice) -> None:
        """Awaited for each answer before its `AnswerEnd` is given."""
        ...

    def closed(self, reply: "Reply") -> None:
        """Called once, at the end of the reply's block."""
        ...

    def called(self, reply: "Reply", call: ToolCallDelta, name: str) -> None:
        """Called with the first piece of each call of a tool, and the tool's name."""
        ...

    def gap(self, gap_s: float) -> None:
        """Called with the seconds between two tokens of an answer."""
        ...


class Reply:
    """Read `events()` to the end, within ``async with reply:``. Leaving the block early cancels what still runs.

    `host` is called at the points that `ReplyHost` lists.
    """

    def __init__(
        self,
        request: ServiceRequest,
        *,
        rendered: Rendered | None,
        num_prompt: int,
        render_s: float = 0.0,
        used: Mapping[str, Used] | None = None,
        choices: Sequence[Choice],
        backend: Backend,
        limits: Limits,
        clock: LoopClock,
        host: ReplyHost,
    ) -> None:
        self.request = request
        self.rendered = rendered
        self.num_prompt = num_prompt
        self.render_s = render_s
        """From the request's arrival to the engine's queue."""
        self.used = {} if used is None else dict(used)
        """The sampling parameters, for the record."""
        self.choices = tuple(choices)
        self.inbox = Inbox(limit=limits.max_unread, on_overflow=self.cancel, clock=clock)
        self._clock = clock
        self.created = time.time()
        self.ended: list[AnswerEnd] = []
        self.error: Exception | None = None
        self.closed = asyncio.Event()
        """Set at the end of the block, which a client that has heard the whole answer may be ahead of."""
        self.recording: asyncio.Task[Record] | None = None
        """Writes the request's record, from the end of the block on."""
        self._backend = backend
        self._keep_alive_s = limits.keep_alive_s
        self._host = host
        self._cached: dict[int, int] = {}
        self._token_at_s: dict[int, float] = {}
        self._why: RepriseError | None = None
        """Why it was cancelled, where that was not its client."""
        self._progress = PrefillProgress(request_id=request.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.error is None and isinstance(error, Exception):
            self.error = error
        if isinstance(error, RepriseError):
            error.has_record = True
        self.cancel()
        self._host.closed(self)
        self.closed.set()

    @property
    def is_over(self) -> bool:
        """Whether the engine is done with all jobs."""
        return all(choice.is_over for choice in self.choices)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(choice.outcome for choice in self.choices if choice.outcome is not None)

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            num_prompt=self.num_prompt,
            # The choice that found least did the work that the others then shared.
            num_cached=min(self._cached.values(), default=0),
            num_stored=sum(outcome.num_stored for outcome in self.outcomes),
            num_completion=sum(outcome.num_generated for outcome in self.outcomes),
            num_reasoning=sum(choice.parser.num_reasoning_tokens for choice in self.choices),
            num_accepted=sum(outcome.num_accepted for outcome in self.outcomes),
            num_rejected=sum(outcome.num_drafted - outcome.num_accepted for outcome in self.outcomes),
        )

    def cancel(self, why: RepriseError | None = None) -> None:
        """Cancel the jobs that still run. Safe on any thread. `why`: what `events` then raises; None: that."""
        self._why = self._why or why
        for choice in self.choices:
            if not choice.is_over:
                self._backend.cancel(choice.job_id)

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        """The events of all choices, in the order in which they come. Raises the error that ended the request."""
        position = total = 0
        # A long prefill makes progress without an event: what counts is when the client last received something.
        due_s = self._clock.now_s() + self._keep_alive_s
        turn_s = time.monotonic()
        while not self.is_over:
            if self.inbox.is_empty:
                # It waits now, and others have their turn.
                turn_s = time.monotonic()
            elif time.monotonic() - turn_s > _TURN_S:
                # What a slow reader left waiting is plenty: neither the inbox nor the connection waits for anything.
                await asyncio.sleep(0)
                turn_s = time.monotonic()
            item = await self.inbox.get(max(0.0, due_s - self._clock.now_s()))
            if self._clock.now_s() >= due_s:
                due_s = self._clock.now_s() + self._keep_alive_s
                yield StillWaiting(position=position, total=total)
            if item is None:
                continue
            index, event = item
            if isinstance(event, Started):
                position, total = event.num_reused, event.total
                self._progress.restart(position=position, now_s=time.monotonic())
            elif isinstance(event, Progress):
                position, total = event.position, event.total
                self._progress.hear(event)
            elif isinstance(event, Sampled):
                self._note_gap(index)
            choice = self.choices[index]
            try:
                reply_events = choice.take(event)
            except RequestCancelled as error:
                self.error = self._cancelled()
                raise self.error from error
            except Exception as error:
                self.error = error
                raise
            if choice.wants_stop and not choice.is_over:
                self._backend.cancel(choice.job_id)
            for reply_event in reply_events:
                due_s = self._clock.now_s() + self._keep_alive_s
                match reply_event:
                    case Began():
                        self._cached[index] = reply_event.num_cached
                    case AnswerDelta(deltas=deltas):
                        for delta in deltas:
                            if isinstance(delta, ToolCallDelta) and delta.name is not None:
                                self._host.called(self, delta, delta.name)
                    case AnswerEnd():
                        await self._host.learn(self, choice)
                        self.ended.append(reply_event)
                    case _:
                        pass
                yield reply_event

    def _note_gap(self, index: int) -> None:
        now_s = time.perf_counter()
        if index in self._token_at_s:
            self._host.gap(now_s - self._token_at_s[index])
        self._token_at_s[index] = now_s

    def _cancelled(self) -> RepriseError:
        if self._why is not None:
            return self._why
        if self.inbox.has_overflowed:
            return RequestCancelled(
                "The request was cancelled: its stream was not read. Read faster, or do not stream."
            )
        return RequestCancelled("The request was cancelled.")

    async def drain(self, timeout_s: float) -> None:
        """Wait, after a cancel, for the last counts of the jobs. Gives up after `timeout_s` seconds without any."""
        while not self.is_over:
            item = await self.inbox.get(timeout_s)
            if item is None:
                return
            index, event = item
            if isinstance(event, Finished):
                self.choices[index].outcome = event.outcome
