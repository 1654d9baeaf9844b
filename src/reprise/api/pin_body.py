"""The bodies of `/v1/cache/pin`, and what they name."""

from typing import Annotated

from pydantic import Field

from reprise.api.prefill_body import PrefillBody
from reprise.api.service import ChatService
from reprise.api.warm import prefix_of
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import own_tokens


class PinBody(PrefillBody):
    """What to pin."""

    ttl: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds; null: until it is unpinned."""


class UnpinBody(PrefillBody):
    """What to unpin: the body that was pinned, or the `id` of the answer."""

    id: Annotated[str, Field(max_length=200)] | None = None


async def pinned_prefix(body: PrefillBody, service: ChatService, *, namespace: str) -> Prompt:
    """The prefix that a body pins, with an explicit boundary at its end. Raises BadRequest, QueueFull, ShuttingDown.

    Of a system prompt with tools: where they end. Of another chat: what its next turn has in common with it. Of a plain
    prompt: all of it.
    """
    service.served.check_name(body.model)
    asked, until = await service.off_loop(lambda: prefix_of(body, service))
    prompt = await service.prefix(asked, namespace=namespace, until=until)
    ends = [b.position for b in prompt.boundaries if b.kind is BoundaryKind.STABLE and b.position > 0]
    end = max(ends, default=len(prompt)) if until is None else len(prompt)
    inside = (boundary for boundary in prompt.boundaries if boundary.position <= end)
    marked = {*inside, Boundary(end, BoundaryKind.EXPLICIT)}
    return Prompt(tokens=own_tokens(prompt.tokens[:end]), boundaries=tuple(sorted(marked)))
