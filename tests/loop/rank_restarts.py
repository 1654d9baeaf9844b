"""Two ranks in one process, started one after the other on their directories."""

from pathlib import Path
from typing import Any

from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from tests.loop.driving import DrivenEngine
from tests.loop.following import LeaderAndFollower
from tests.loop.restarts import Restarts
from tests.models.shared import loader
from tests.models.tiny import tiny_model


class RankRestarts(Restarts):
    """Starts both ranks, and ends those before; each has a directory, "0" and "1"."""

    following: LeaderAndFollower | None = None

    def __call__(self, model: str | Path = "llama", *, their_bytes: int = 1 << 30, **options: Any) -> DrivenEngine:
        self.end()
        directory = str(tiny_model(str(model)))
        load = loader(Settings(model=directory))
        assert load is not None
        theirs = Settings(model=directory, disk_directory=str(self.directory / "1"), disk_bytes=Bytes(their_bytes))
        self.following = LeaderAndFollower(load, theirs)
        given = {"load": self.following, "shares_from": 64, "disk_directory": str(self.directory / "0")}
        return super().__call__(model, **given | options)

    def end(self) -> None:
        super().end()
        if self.following is not None:
            self.following.end()
