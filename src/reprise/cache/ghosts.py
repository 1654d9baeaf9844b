"""What was evicted from an edge, remembered just long enough to say so when a prompt comes back for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

_MOST = 64
"""How many of each are remembered for one edge; the oldest are forgotten first."""


@dataclass(slots=True)
class Ghosts:
    """The evicted checkpoints of one edge, and the evicted paths that left it.

    A path is known by where it left and the token that it went on with.
    """

    checkpoints: list[int] = field(default_factory=list[int])
    paths: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def lose_checkpoint(self, position: int) -> None:
        self.forget_checkpoint(position)
        self.checkpoints = [*self.checkpoints, position][-_MOST:]

    def lose_path(self, position: int, token: int) -> None:
        lost = (position, token)
        self.paths = [*(path for path in self.paths if path != lost), lost][-_MOST:]

    def forget_checkpoint(self, position: int) -> None:
        """The checkpoint was made again."""
        self.checkpoints = [at for at in self.checkpoints if at != position]

    def up_to(self, position: int) -> "Ghosts":
        """The part of the edge that ends at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at <= position],
            paths=[path for path in self.paths if path[0] <= position],
        )

    def behind(self, position: int) -> "Ghosts":
        """The part of the edge that begins at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at > position],
            paths=[path for path in self.paths if path[0] > position],
        )


def join_ghosts(parts: Iterable[Ghosts | None]) -> Ghosts | None:
    """Those of several edges that became one."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Ghosts(
        checkpoints=[at for part in known for at in part.checkpoints][-_MOST:],
        paths=[path for part in known for path in part.paths][-_MOST:],
    )
