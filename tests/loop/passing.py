"""What a `Backend` passes on to a loop as it is, for those of the tests that stand between the two."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from reprise.core.backend import Lookup, Status, StoredRun
from reprise.core.inspection import WHOLE_TREE, DiskTree, EdgeTokens, InspectedEviction, Inspection, TreePart
from reprise.core.pin import PinList
from reprise.core.prompt import Prompt
from reprise.core.tokens import Span, Tokens
from reprise.loop import EngineClient


@dataclass(eq=False)
class Passing:
    """All of a `Backend` but `submit`."""

    loop: EngineClient

    def cancel(self, job_id: str) -> bool:
        return self.loop.cancel(job_id)

    def status(self) -> Status:
        return self.loop.status()

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        return self.loop.inspect(max_nodes=max_nodes, part=part)

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        return self.loop.lookup(prompt, namespace=namespace)

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        return self.loop.edge_tokens(part, max_nodes=max_nodes)

    def disk_tree(self, namespace: str) -> DiskTree | None:
        return self.loop.disk_tree(namespace)

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        return self.loop.disk_tokens(namespace, key, span)

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        return self.loop.next_evictions(nbytes, most=most)

    def read_note(self, namespace: str) -> str | None:
        return self.loop.read_note(namespace)

    def keep_note(self, namespace: str, text: str) -> None:
        self.loop.keep_note(namespace, text)

    def hurry(self) -> None:
        self.loop.hurry()

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        return self.loop.stored_runs(namespace)

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        return self.loop.clear(namespace, owner=owner)

    def pins(self, namespace: str, *, owner: str = "") -> Future[PinList]:
        return self.loop.pins(namespace, owner=owner)

    def unpin(self, pin_id: str, *, namespace: str, owner: str = "") -> Future[bool]:
        return self.loop.unpin(pin_id, namespace=namespace, owner=owner)
