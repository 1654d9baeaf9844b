"""A sequence of a draft model: follows an answer, predicts its next tokens, and undoes wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from reprise.engine.running.runner import LiveSequence, Runner
from reprise.engine.running.sampler import TokenSampler


class DraftSequence:
    """Has been fed `position` tokens of a text, and possibly some predicted tokens after them."""

    def __init__(self, runner: Runner, live: LiveSequence) -> None:
        """`live` is the only sequence in its batch."""
        self.live = live
        self._runner = runner
        self._guessed: tuple[int, ...] = ()
        """The predicted tokens that were fed after `position`."""

    @property
    def position(self) -> int:
        """How many tokens of the text it was fed."""
        return self.live.position - len(self._guessed)

    def growth(self, num: int) -> int:
        """Bytes by which its buffers grow with `num` more tokens, including predicted ones."""
        return self._runner.growth([self.live], num) + self._runner.footprint.snapshot

    def keep(self, text: Sequence[int]) -> Sequence[int]:
        """The text continues with `text`: keep correct predictions, undo the rest. Returns what is still to be fed.

        That is at least the last token. Recurrent layers can only return to the state before the first prediction.
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
        """Feed the text after `position`. Returns how many tokens the model was fed."""
        rest, rows = self.keep(text), self.live.rows
        if len(rest) > 0:
            rows.forward(self._runner.loaded.model, mx.array([list(rest)]))
        mx.eval(rows.arrays())
        return len(rest)

    def guess(self, text: Sequence[int], num: int, *, sampler: TokenSampler, vocab_size: int) -> tuple[int, list[int]]:
        """The text continues with `text` (at least one token): predict `num` tokens after it, in `num` passes.

        They are sampled as `sampler` will sample for its own model, with a vocabulary of `vocab_size` and the same
        noise, so that two models that nearly agree choose the same token. Returns how many tokens of `text` the model
        was fed, and the predictions.
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
    """Logits for a vocabulary of this size: models pad theirs to different lengths."""
    if logits.shape[-1] >= vocab_size:
        return logits[:vocab_size]
    never = mx.full((vocab_size - logits.shape[-1],), -float("inf"), dtype=logits.dtype)
    return mx.concatenate([logits, never])
