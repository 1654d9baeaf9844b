"""Where and why one request cannot reuse another, from their renderings alone, without a server."""

from dataclasses import dataclass

from reprise.chat.reasons.explain import Explanation, explain
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.chat.text_model import TextModel
from reprise.core.outcome import Outcome, Reason
from reprise.core.tokens import common_prefix

_NUM_SHOWN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestComparison:
    """What the second of two requests could reuse of the first one's prompt, and why not more.

    `first` and `second` are the lengths of the prompts, in tokens. A model that resumes anywhere reuses `reused`
    tokens, one that resumes at snapshots only `resumable`.
    """

    first: int
    second: int
    reused: int
    resumable: int
    explanation: Explanation
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.resumable <= self.reused < self.second, self


def compare_requests(text_model: TextModel, first: ChatRequest, second: ChatRequest) -> RequestComparison:
    """Compare two requests as a server would that has served the first and forgets nothing.

    What the model answered to the first is not known, so only its prompt counts. Raises BadRequest and TemplateFailed.
    """
    renderer = Renderer(text_model)
    before, after = renderer.render(first), renderer.render(second)
    known, tokens = before.prompt.tokens, after.prompt.tokens
    shared = common_prefix(known, tokens)
    reused = min(shared, len(tokens) - 1)
    is_parted = shared < len(known)
    outcome = Outcome(
        num_prompt=len(tokens),
        num_matched=shared,
        num_reused=reused,
        num_prefilled=len(tokens) - reused,
        reason=Reason.BRANCHED if is_parted else Reason.NEW_TOKENS,
        stored_next=known[shared : shared + _NUM_SHOWN] if is_parted else None,
    )
    # Prefill pauses at the boundaries, and before the last token.
    pauses = (*(boundary.position for boundary in before.prompt.boundaries), len(known) - 1)
    return RequestComparison(
        first=len(known),
        second=len(tokens),
        reused=reused,
        resumable=max((position for position in pauses if position <= reused), default=0),
        explanation=explain(after, outcome, earlier=(before,), text_model=text_model),
        notes=after.notes,
    )
