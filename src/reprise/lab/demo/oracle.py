"""The least that any prefix cache could compute: an oracle that remembers every state it ever had."""

from dataclasses import dataclass, field

from reprise.core.tokens import Tokens, common_prefix


@dataclass(slots=True)
class Oracle:
    """Remembers all token runs that were computed, and which prompts were answered."""

    _computed: list[Tokens] = field(default_factory=list[Tokens])
    _answered: set[bytes] = field(default_factory=set[bytes])

    def cost(self, prompt: Tokens) -> int:
        """How many of the prompt's tokens it has to compute: at least one, whose logits start the answer, or none if
        this very prompt was answered before.

        O(runs remembered x length of the shared prefix).
        """
        if prompt.tobytes() in self._answered:
            return 0
        known = max((common_prefix(prompt, run) for run in self._computed), default=0)
        return max(1, len(prompt) - known)

    def remember(self, run: Tokens, *, num_prompt: int | None = None) -> None:
        """The run, a prompt of `num_prompt` tokens with its answer, was computed. None: nothing was answered."""
        self._computed.append(run)
        if num_prompt is not None:
            self._answered.add(run[:num_prompt].tobytes())
