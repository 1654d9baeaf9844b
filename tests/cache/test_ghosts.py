from reprise.cache.node import GhostPath, Ghosts, join_ghosts
from reprise.core.tokens import as_tokens


def path(start: int, token: int) -> GhostPath:
    return GhostPath.of(as_tokens([token]), start=start, stop=start + 1)


def test_few_are_remembered_and_the_oldest_go_first() -> None:
    ghosts = Ghosts()
    for at in range(200):
        ghosts.add_checkpoint(at)
        ghosts.add_path(path(at, 7))
    assert ghosts.checkpoints == list(range(136, 200))
    assert ghosts.paths == [path(at, 7) for at in range(136, 200)]
    joined = join_ghosts([ghosts, None, Ghosts(checkpoints=[500], paths=[path(500, 1)])])
    assert joined is not None and len(joined.checkpoints) == len(joined.paths) == 64
    assert joined.checkpoints[-1] == 500 and joined.paths[-1] == path(500, 1)


def test_what_is_lost_twice_is_remembered_once() -> None:
    ghosts = Ghosts()
    for at in (5, 6, 5):
        ghosts.add_checkpoint(at)
        ghosts.add_path(path(at, 7))
    assert ghosts.checkpoints == [6, 5] and ghosts.paths == [path(6, 7), path(5, 7)]


def test_a_checkpoint_that_was_made_again_is_forgotten() -> None:
    ghosts = Ghosts(checkpoints=[5, 6])
    ghosts.forget_checkpoint(5)
    assert ghosts.checkpoints == [6]


def test_the_two_parts_of_a_split_edge_share_them() -> None:
    ghosts = Ghosts(checkpoints=[4, 5, 6], paths=[path(5, 1), path(6, 2)])
    assert ghosts.up_to(5) == Ghosts(checkpoints=[4, 5], paths=[path(5, 1)])
    assert ghosts.after(5) == Ghosts(checkpoints=[6], paths=[path(6, 2)])


def test_edges_that_lost_nothing_have_nothing_to_join() -> None:
    assert join_ghosts([None, None]) is None


def test_a_path_is_known_by_its_first_words() -> None:
    lost = GhostPath.of(as_tokens(list(range(40))), start=5, stop=45)
    assert lost.is_on(as_tokens(list(range(60)))) and lost.is_on(as_tokens([0, 1]))
    assert not lost.is_on(as_tokens([0, 1, 3])), "one token in common may begin anything"
    assert not lost.is_on(as_tokens([]))
