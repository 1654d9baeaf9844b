"""What the engine shows of itself is what it holds, and looking changes nothing."""

import threading

import pytest

from reprise.core.events import Started
from reprise.core.inspection import InspectedNode, Inspection, LastUse, PhaseName
from reprise.core.job import Purpose
from reprise.core.prompt import Boundary, BoundaryKind
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK, Restarts, words


def leaves(shown: Inspection) -> list[InspectedNode]:
    parents = {node.parent for node in shown.tree.nodes}
    return [node for node in shown.tree.nodes if node.id not in parents]


@pytest.mark.parametrize("shares_from", [10, 4096])
def test_the_tree_and_the_memory_add_up(shares_from: int) -> None:
    engine = DrivenEngine("qwen3_5", shares_from=shares_from)
    try:
        system, boundary = words(1, 40), [Boundary(40, BoundaryKind.SYSTEM)]
        for branch in range(3):
            engine.run([*system, *words(10 + branch, 50)], boundaries=boundary, namespace="a")
        pinned = [Boundary(30, BoundaryKind.EXPLICIT)]
        engine.run([*system, 7], purpose=Purpose.PREFILL, pin_for_s=60.0, boundaries=pinned)
        shown = engine.inspect()
        tree, memory = shown.tree, shown.memory
        assert len(tree.nodes) == tree.num_nodes
        assert sum(node.num_tokens for node in tree.nodes) == tree.num_tokens
        assert sum(node.nbytes for node in tree.nodes) == memory.kv_nbytes > 0
        checkpoints = [checkpoint for node in tree.nodes for checkpoint in node.checkpoints]
        assert len(checkpoints) == tree.num_checkpoints
        assert sum(checkpoint.nbytes for checkpoint in checkpoints) == memory.checkpoint_nbytes > 0
        assert memory.weights_nbytes > 0 and memory.device_nbytes >= memory.weights_nbytes
        assert memory.process_nbytes > memory.device_nbytes
        trunk = next(node for node in tree.nodes if node.namespace == "a" and node.num_children == 3)
        assert trunk.first_tokens == tuple(system[:24]) and trunk.num_tokens == 40 and trunk.last_use is LastUse.STORED
        assert [at.position for at in checkpoints if at.pinned_for_s is not None] == [30]
        assert (shown.requests, shown.num_inside, shown.num_sequences) == ((), 0, len(shown.idle))
        assert (len(shown.idle) > 0) == (shares_from == 10) == any(node.shared_nbytes > 0 for node in tree.nodes)
        # Looking neither used nor moved anything.
        again = engine.inspect()
        assert [node.id for node in again.tree.nodes] == [node.id for node in tree.nodes]
        assert [node.num_uses for node in again.tree.nodes] == [node.num_uses for node in tree.nodes]
    finally:
        engine.close()


def test_a_bound_shows_what_was_used_last_with_all_above_it() -> None:
    engine = DrivenEngine("llama")
    try:
        for branch in range(6):
            engine.run([1, 2, 3, *words(branch, 20)])
        engine.run([1, 2, 3, *words(2, 20), 5])
        shown = engine.loop.inspect(max_nodes=3).result(PATIENCE_S)
        assert len(shown.tree.nodes) == 3 < shown.tree.num_nodes
        root, trunk, branch_node = shown.tree.nodes
        assert (root.parent, trunk.parent, branch_node.parent) == (None, root.id, trunk.id)
        assert list(branch_node.first_tokens[:20]) == words(2, 20)
    finally:
        engine.close()


def test_requests_are_shown_where_they_are() -> None:
    engine = DrivenEngine("llama", max_batch=1)
    try:
        engine.run([1, 2, 3, 4], num=1)
        may_go_on = threading.Event()
        # It stays on its way for as long as its client does not take what it is told.
        running = engine.submit([1, 2, 3, 4, 5, 6], num=50, on_event=lambda event: wait_for(may_go_on))
        running.wait_for(Started)
        waiting = engine.submit([9, 8, 7], num=2)
        shown_later = engine.loop.inspect()
        may_go_on.set()
        shown = shown_later.result(PATIENCE_S)
        first = next(request for request in shown.requests if request.id == running.job.id)
        assert first.phase in (PhaseName.PREFILLING, PhaseName.DECODING)
        assert (first.num_prompt, first.num_matched, first.num_reused) == (6, 4, 4) and first.nbytes > 0
        assert [node.request_ids for node in shown.tree.nodes if node.request_ids] == [(running.job.id,)]
        second = next(request for request in shown.requests if request.id == waiting.job.id)
        assert (second.phase, second.num_reused, second.nbytes) == (PhaseName.WAITING, None, 0)
        assert shown.num_inside == 2 and shown.num_sequences == 1
        running.wait(), waiting.wait()
    finally:
        engine.close()


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_what_is_on_disk_is_shown_edge_by_edge(start: Restarts, model: str) -> None:
    engine = start(model)
    system, boundary = words(3, 2 * BLOCK + 5), [Boundary(2 * BLOCK + 5, BoundaryKind.SYSTEM)]
    engine.run([*system, *words(4, 2 * BLOCK)], boundaries=boundary)
    engine.run([*system, *words(5, 2 * BLOCK)], boundaries=boundary)
    assert sum(node.disk_nbytes for node in engine.inspect().tree.nodes) == 0
    engine = start(model)
    engine.run([*system, *words(4, 2 * BLOCK)], boundaries=boundary)
    engine.run([*system, *words(5, 2 * BLOCK)], boundaries=boundary)
    shown = engine.inspect()
    assert shown.disk is not None and shown.disk.nbytes > 0
    assert sum(node.disk_nbytes for node in shown.tree.nodes) == shown.disk.nbytes
    assert all(leaf.disk_nbytes > 0 for leaf in leaves(shown))
    at_checkpoints = sum(at.disk_nbytes for node in shown.tree.nodes for at in node.checkpoints)
    assert 0 < at_checkpoints < shown.disk.nbytes, "tail records end at checkpoints, and blocks anywhere"
