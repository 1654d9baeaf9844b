"""Follows an answer along the text that it was drafted from, also over values that were changed."""

from collections.abc import Sequence

from reprise.core.backend import DraftSource
from reprise.core.tokens import Tokens
from reprise.drafts.history import TokenHistory

_REACH = 24
"""How many tokens behind the place where the answer left the text are searched for the one where it returns."""

CONFIRMED = 4
"""Equal tokens in a row after which the answer is taken to be back: fewer may be chance."""

_LOST = 64
"""After this many tokens that do not lead back, the text is given up."""


class Trail:
    """Where in a history an answer is.

    An answer that changes a value continues behind the old one. An n-gram look-up has to wait for several equal tokens,
    and finds the newest place that has them. Here the place is known, so one equal token is enough.
    """

    def __init__(self, history: TokenHistory, at: int, *, match: int, source: DraftSource) -> None:
        """`at`: the position of the next token, behind `match` equal ones."""
        self.history = history
        self.at = at
        self.match = match
        """Equal tokens in a row."""
        self.source = source
        self._left_at: int | None = None
        """Where the answer left the text; None while it follows it."""
        self._behind: list[int] = []
        """The tokens behind that place, in which it may be back."""
        self._num_away = 0

    @property
    def is_resumed(self) -> bool:
        """Whether it is a guess that the answer is back in the text."""
        return self._left_at is not None

    @property
    def is_lost(self) -> bool:
        return self._num_away > _LOST

    def follow(self, tokens: Sequence[int]) -> None:
        """The answer continued with these tokens."""
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        if self.match > 0 and self.history.token(self.at) == token:
            self.at += 1
            self.match += 1
        else:
            if self._left_at is None:
                self._left_at, self._behind = self.at, self.history.read(self.at, _REACH).tolist()
            self.match = 1 if token in self._behind else 0
            self.at = self._left_at + (self._behind.index(token) + 1 if self.match > 0 else 0)
        self._num_away += 1
        if self._left_at is None or self.match >= CONFIRMED:
            self._left_at, self._num_away = None, 0

    def continuation(self, num: int) -> Tokens | None:
        """Up to `num` tokens that followed there; None if the answer is elsewhere."""
        tokens = self.history.read(self.at, num)
        return tokens if self.match > 0 and len(tokens) > 0 else None
