"""The least that any prefix cache could compute: an oracle that remembers every state it ever had."""

from dataclasses import dataclass, field

from reprise.core.tokens import Tokens, common_prefix


@dataclass(slots=True)
class Oracle:
    """Remembers all token runs that were computed."""

    _computed: list[Tokens] = field(default_factory=list[Tokens])

    def cost(self, prompt: Tokens) -> int:
        """How many of the prompt's tokens it has to compute: at least one, whose logits start the answer.

        O(runs remembered x length of the shared prefix).
        """
        known = max((common_prefix(prompt, run) for run in self._computed), default=0)
        return max(1, len(prompt) - known)

    def remember(self, run: Tokens) -> None:
        """The run, a prompt with its answer, was computed."""
        self._computed.append(run)
