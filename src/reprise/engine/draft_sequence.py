"""A sequence of a draft model: it follows an answer, guesses how that goes on, and takes back what was wrong."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from reprise.engine.runner import LiveSequence, Runner
from reprise.engine.token_sampler import TokenSampler


class DraftSequence:
    """Stands behind `position` tokens of a text, and perhaps behind some more that it has guessed."""

    def __init__(self, runner: Runner, live: LiveSequence) -> None:
        """`live` is alone in its batch."""
        self.live = live
        self._runner = runner
        self._guessed: tuple[int, ...] = ()
        """What was fed behind `position`."""

    @property
    def position(self) -> int:
        """How many tokens of the text it has been fed."""
        return self.live.position - len(self._guessed)

    def growth(self, num: int) -> int:
        """Bytes by which its buffers grow with `num` more tokens, guesses among them."""
        return self._runner.growth([self.live], num) + self._runner.footprint.snapshot

    def keep(self, text: Sequence[int]) -> Sequence[int]:
        """The text goes on with `text`: keep what was guessed of it, undo the rest. Gives what is still to be fed.

        That is at least the last token. Recurrent layers go back to where they were before the first guess.
        """
        rows, guessed = self.live.rows, self._guessed
        most = min(len(guessed), max(0, len(text) - 1))
        num = next((i for i in range(most) if guessed[i] != text[i]), most)
        if num < len(guessed) and not self._runner.loaded.blueprint.rewinds:
            num = 0
        if num < len(guessed):
            rows.undo_last(len(guessed) - num, rows.before_guess)
        rows.before_guess, self._guessed = {}, ()
        return text[num:]

    def feed(self, text: Sequence[int]) -> int:
        """Compute what the text goes on with behind `position`. Gives how many tokens the model was fed."""
        rest, rows = self.keep(text), self.live.rows
        if len(rest) > 0:
            rows.forward(self._runner.loaded.model, mx.array([list(rest)]))
        mx.eval(rows.arrays())
        return len(rest)

    def guess(self, text: Sequence[int], num: int, *, sampler: TokenSampler, vocab_size: int) -> tuple[int, list[int]]:
        """The text goes on with `text`, at least one token: guess `num` tokens behind that, in `num` passes.

        They are chosen as `sampler` will choose from its own model, of a vocabulary of `vocab_size`: with the same
        noise, so that two models that nearly agree choose the same token. Gives how many tokens of `text` the model
        was fed, too.
        """
        model, rows = self._runner.loaded.model, self.live.rows
        rest = self.keep(text)
        logits = rows.forward(model, mx.array([list(rest)]))[0, -1]
        if num > 1:
            rows.before_guess = rows.save_recurrent()
            for layer in rows.kv_layers():
                layer.keep_visible(num - 1)
        chosen: list[mx.array] = []
        for num_pending in range(num):
            chosen.append(sampler.guess(_of_size(logits, vocab_size), num_pending))
            if num_pending < num - 1:
                logits = rows.forward(model, chosen[-1].reshape(1, 1).astype(mx.int32))[0, -1]
        tokens = mx.stack(chosen)
        mx.eval(tokens, rows.arrays(), list(rows.before_guess.values()))
        guessed = [int(token) for token in tokens.tolist()]
        self._guessed = tuple(guessed[:-1])
        return len(rest), guessed


def _of_size(logits: mx.array, vocab_size: int) -> mx.array:
    """Logits over another number of tokens: vocabularies are padded to different lengths."""
    if logits.shape[-1] >= vocab_size:
        return logits[:vocab_size]
    never = mx.full((vocab_size - logits.shape[-1],), -float("inf"), dtype=logits.dtype)
    return mx.concatenate([logits, never])
