"""Stop strings: found across tokens, by the same rule on the engine thread and in the text for the user.

Stops apply to content: all text after reasoning that is no tool call. Reasoning is not cut (as in the OpenAI API, whose
stops see only the visible answer), and neither is a call that is being written, since half a call is of no use. Where
tool markup is text (no tools in the request), it is content like any other. Newlines between reasoning and content
belong to neither, so a stop of newlines cannot end an answer before it began. Nor is a stop looked for in the text of
the tokens that an answer has to have (`min_tokens`).
"""

import re
from collections.abc import Sequence

from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.markup import Channel, part_of
from reprise.chat.answers.reader import TextChunk, Transition
from reprise.chat.scan import first_match, num_held


class ContentText:
    """The visible content of an answer: without the newlines after reasoning, cut before the first stop string."""

    def __init__(self, stops: Sequence[str], *, is_begun: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        # White space at the beginning waits: reasoning may follow, and then it is no content.
        self._is_begun = is_begun
        self._follows_markup = False
        # This much of the held text belongs to the answer in any case.
        self._num_unwatched = 0
        self.stop: str | None = None
        """The stop string that was found."""

    @property
    def has_stops(self) -> bool:
        return len(self._stops) > 0

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is certain to be visible once this piece was read. `may_stop`: stops are looked for in it."""
        if self.stop is not None:
            return ""
        self._pending += piece
        if not may_stop:
            self._num_unwatched = len(self._pending)
        if not self._is_begun:
            is_blank = not self._pending.strip()
            watched = self._pending[self._num_unwatched :]
            if is_blank and (self._follows_markup or first_match(watched, self._stops) is None):
                return ""
            if self._follows_markup:
                # Only whole lines go: what stands before the first word on its own line is indentation.
                kept = re.sub(r"\A\s*\n", "", self._pending)
                self._num_unwatched = max(0, self._num_unwatched - (len(self._pending) - len(kept)))
                self._pending = kept
            self._is_begun = True
        return self._cut()

    def turn(self, turn: Transition) -> str:
        """The text that is certain since a marker ended the content."""
        to = part_of(turn.to)
        if to is Channel.REASONING and not self._is_begun:
            self._pending = ""
        text = self.flush()
        self._follows_markup = self._follows_markup or to is Channel.CONTENT
        return text

    def flush(self) -> str:
        """What waited."""
        if self.stop is not None or (self._follows_markup and not self._is_begun):
            # Nothing but white space stands after the markup.
            self._pending = ""
        text, self._pending, self._num_unwatched = self._pending, "", 0
        return text

    def _cut(self) -> str:
        unwatched, watched = self._pending[: self._num_unwatched], self._pending[self._num_unwatched :]
        self._num_unwatched = 0
        found = first_match(watched, self._stops)
        if found is not None:
            self.stop = self._stops[found.index]
            self._pending = ""
            return unwatched + watched[: found.start]
        safe = len(watched) - num_held(watched, self._stops)
        self._pending = watched[safe:]
        return unwatched + watched[:safe]


class StopWatch:
    """Says when a sequence has to stop: `Job.watch`. Made for one sequence, of the format of its AnswerParser."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._reader = answer_format.reader(answer_format.markup())
        self._content = ContentText(answer_format.stops, is_begun=answer_format.is_content_open)
        self._num_kept = answer_format.min_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._content.stop

    def __call__(self, token: int) -> bool:
        """Whether a stop string is complete after this token."""
        may_stop = self._num_kept == 0
        self._num_kept = max(0, self._num_kept - 1)
        for part in self._reader.feed(token):
            if isinstance(part, Transition):
                self._content.turn(part)
            elif isinstance(part, TextChunk) and part.part is Channel.CONTENT:
                self._content.add(part.text, may_stop=may_stop)
        return self._content.stop is not None
