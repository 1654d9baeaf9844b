"""One answer in progress: the engine's events in, the reply's events out. No I/O."""

from collections.abc import Sequence

from reprise.api.exchange import AnswerDelta, AnswerEnd, Began, EndReason, ReplyEvent
from reprise.chat.answer import Answer, Delta, ToolCallDelta
from reprise.chat.parse import AnswerParser
from reprise.core.errors import EngineFailed, RequestCancelled
from reprise.core.events import Event, Finished, FinishReason, Progress, Sampled, Scored, Started
from reprise.core.outcome import Outcome


class Choice:
    """The answer number `index`. `tokens` is everything sampled, stop token included; `outcome` is set at the end.

    `wants_stop` turns true when the answer is complete before the engine knows: after the first tool call, where only
    one is allowed. The job is then to be cancelled, and its end counts as a stop. With `tells_end` the token that ended
    the answer has its log-probability told like the others. `done_as` is the end of an answer that is not sampled.
    """

    def __init__(
        self,
        index: int,
        parser: AnswerParser,
        *,
        wants_logprobs: bool,
        allows_parallel_calls: bool,
        tells_end: bool = False,
        done_as: EndReason = EndReason.STOP,
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.outcome: Outcome | None = None
        self.wants_stop = False
        self.parser = parser
        self._wants_logprobs = wants_logprobs
        self._allows_parallel_calls = allows_parallel_calls
        self._tells_end = tells_end
        self._done_as = done_as
        self._untold: list[Sampled] = []
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
        if self._wants_logprobs and (self._tells_end or not event.is_stop):
            self._untold.append(event)
        deltas = self._piece(self.parser.feed(event.token, is_stop=event.is_stop))
        if not self._allows_parallel_calls and self.parser.num_calls_begun > 1:
            # A call that is held until it is whole need not be waited for.
            self.wants_stop = True
        return deltas

    def _piece(self, deltas: Sequence[Delta], *, is_last: bool = False) -> Sequence[ReplyEvent]:
        allowed = tuple(delta for delta in deltas if self._is_allowed(delta))
        if not allowed and not (is_last and self._untold):
            return ()
        tokens = tuple(self._untold)
        self._untold.clear()
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
