from reprise.cache.node import Ghosts, join_ghosts


def test_few_are_remembered_and_the_oldest_go_first() -> None:
    ghosts = Ghosts()
    for at in range(200):
        ghosts.add_checkpoint(at)
        ghosts.add_path(at, 7)
    assert ghosts.checkpoints == list(range(136, 200))
    assert ghosts.paths == [(at, 7) for at in range(136, 200)]
    joined = join_ghosts([ghosts, None, Ghosts(checkpoints=[500], paths=[(500, 1)])])
    assert joined is not None and len(joined.checkpoints) == len(joined.paths) == 64
    assert joined.checkpoints[-1] == 500 and joined.paths[-1] == (500, 1)


def test_what_is_lost_twice_is_remembered_once() -> None:
    ghosts = Ghosts()
    for at in (5, 6, 5):
        ghosts.add_checkpoint(at)
        ghosts.add_path(at, 7)
    assert ghosts.checkpoints == [6, 5] and ghosts.paths == [(6, 7), (5, 7)]


def test_a_checkpoint_that_was_made_again_is_forgotten() -> None:
    ghosts = Ghosts(checkpoints=[5, 6])
    ghosts.forget_checkpoint(5)
    assert ghosts.checkpoints == [6]


def test_the_two_parts_of_a_split_edge_share_them() -> None:
    ghosts = Ghosts(checkpoints=[4, 5, 6], paths=[(5, 1), (6, 2)])
    assert ghosts.up_to(5) == Ghosts(checkpoints=[4, 5], paths=[(5, 1)])
    assert ghosts.after(5) == Ghosts(checkpoints=[6], paths=[(6, 2)])


def test_edges_that_lost_nothing_have_nothing_to_join() -> None:
    assert join_ghosts([None, None]) is None
