"""Random chats on servers that are stopped, cut off, damaged and started again on one directory."""

import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reprise.core.job import Purpose
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.random_chats import RandomChats
from tests.loop.restarts import Restarts, disk_cache

_PATIENCE_S = 60.0
_VOCABULARY = 200


@dataclass(slots=True, eq=False)
class RandomRestarts:
    """Bursts of `RandomChats`, and what may happen to a server and its directory between two of them."""

    begin: Callable[[], DrivenEngine]
    oracle: DrivenEngine
    restarts: Restarts
    seed: int
    num_loaded: int = 0
    num_restarts: int = 0
    num_damaged: int = 0
    _removed: bool = False

    def run(self, num_bursts: int) -> None:
        source = random.Random(self.seed)
        engine = self.begin()
        chats = RandomChats(engine=engine, oracle=self.oracle, seed=self.seed, has_room=False)
        for burst in range(num_bursts):
            chats.seed = hash((self.seed, burst))
            chats.run(1)
            match source.choice(("nothing", "stop", "stop", "cut off", "damage", "remove")):
                case "stop":
                    self._end(chats)
                    chats.engine = self.begin()
                case "cut off":
                    written = self._written()
                    self._end(chats)
                    self.restarts.end()
                    self._go_back_to(written)
                    chats.engine = self.begin()
                case "damage":
                    self._end(chats)
                    self._damage(source)
                    chats.engine = self.begin()
                case "remove":
                    self._removed = True
                    for file in self._some_files(source):
                        file.unlink(missing_ok=True)
                case _:
                    pass
        self._end(chats)

    def _end(self, chats: RandomChats) -> None:
        self.num_loaded += chats.engine.loop.status().counts.num_loaded
        self.num_restarts += 1
        is_whole = not self._removed
        chats.engine.ask(lambda worker: check_disk(worker, is_whole=is_whole))
        self._removed = False

    def _damage(self, source: random.Random) -> None:
        self.restarts.end()
        for file in self._some_files(source):
            content = bytearray(file.read_bytes())
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
            file.write_bytes(content if source.random() < 0.7 else content[: source.randrange(len(content))])
            self.num_damaged += 1

    def _written(self) -> dict[Path, tuple[bytes, int]]:
        """The records that a process leaves that is killed now, and their times."""
        written: dict[Path, tuple[bytes, int]] = {}
        for file in self.restarts.directory.rglob("*.kv"):
            with suppress(FileNotFoundError):  # It has just been evicted.
                written[file] = file.read_bytes(), file.stat().st_mtime_ns
        return written

    def _go_back_to(self, written: Mapping[Path, tuple[bytes, int]]) -> None:
        for file in self.restarts.directory.rglob("*.kv"):
            file.unlink()
        for file, (content, at_ns) in written.items():
            file.write_bytes(content)
            os.utime(file, ns=(at_ns, at_ns))

    def _some_files(self, source: random.Random) -> list[Path]:
        files = sorted(self.restarts.directory.rglob("*.kv"))
        return source.sample(files, min(len(files), source.choice((1, 3, len(files) // 2))))


def check_disk(worker: Worker, *, is_whole: bool) -> None:
    """Nothing is being read, and what is known of the files is so."""
    disk = disk_cache(worker)
    assert worker.disk.reads() == () and worker.memory.nbytes(Account.INCOMING) == 0
    assert disk.flush(_PATIENCE_S)
    if is_whole:
        disk.check()


@dataclass(slots=True, eq=False)
class _RandomChat:
    """What its last prompt was, where that is stable, and what came of it."""

    prompt: list[int]
    stable_at: int
    answer: list[int]


@dataclass(slots=True, eq=False)
class SteadyTwin:
    """Chats on a server that is stopped and started, and the same ones on one that never is.

    With room for all, both compute the same: the next turn, a new chat with a known system prompt, one whose first
    message also begins like another's, a next turn that leaves what was stable (thinking stripped), and one whose
    beginning was settled resume where they would have.
    """

    begin: Callable[[], DrivenEngine]
    steady: DrivenEngine
    seed: int
    num_restarts: int = 0
    num_loaded: int = 0
    _chats: list[_RandomChat] = field(default_factory=list[_RandomChat])

    def run(self, num_steps: int) -> None:
        source = random.Random(self.seed)
        engine = self.begin()
        system, *projects = (self._words(source, num) for num in (50, 20, 20))
        for step in range(num_steps):
            if source.random() < 0.4:
                self.num_loaded += engine.loop.status().counts.num_loaded
                engine = self.begin()
                self.num_restarts += 1
            chat = source.choice(self._chats) if self._chats and source.random() < 0.8 else None
            if chat is None:
                chat = _RandomChat(prompt=list(system), stable_at=len(system), answer=[])
                self._chats.append(chat)
                prompt = [*system, *source.choice(([], *projects)), *self._words(source, 30)]
            elif chat.answer and source.random() < 0.4:
                # Not what came next before: how far both agree is where it is stable.
                seen = (chat.prompt + chat.answer)[chat.stable_at]
                stripped = [(seen + 1) % _VOCABULARY, *self._words(source, 20)]
                prompt = [*chat.prompt[: chat.stable_at], *stripped]
            else:
                prompt = [*chat.prompt, *chat.answer, *self._words(source, 20)]
            chat.prompt, chat.stable_at = prompt, len(prompt) - source.choice((1, 3, 9))
            here, there = (self._asked(each, chat, len(system)) for each in (engine, self.steady))
            assert here.tokens == there.tokens, step
            assert here.computed == there.computed, (step, here.end, there.end)
            chat.answer = here.tokens
            if source.random() < 0.3:
                self._settle(chat, engine, self._words(source, 20))
        self.num_loaded += engine.loop.status().counts.num_loaded

    def _asked(self, engine: DrivenEngine, chat: _RandomChat, system_at: int) -> SubmittedJob:
        boundaries = [Boundary(system_at, BoundaryKind.SYSTEM), Boundary(chat.stable_at, BoundaryKind.STABLE)]
        return engine.run(chat.prompt, num=10, boundaries=boundaries)

    def _settle(self, chat: _RandomChat, engine: DrivenEngine, rest: list[int]) -> None:
        """Settle the next turn of a chat on both: it repeats what was stable, and `rest` in place of the answer."""
        stable_at = chat.stable_at
        seen = (chat.prompt + chat.answer)[stable_at]
        chat.prompt, chat.answer = [*chat.prompt[:stable_at], (seen + 1) % _VOCABULARY, *rest], []
        chat.stable_at = len(chat.prompt)
        boundaries = [Boundary(chat.stable_at, BoundaryKind.STABLE)]
        for each in (engine, self.steady):
            each.run(chat.prompt, purpose=Purpose.SETTLE, boundaries=boundaries)

    def _words(self, source: random.Random, num: int) -> list[int]:
        return [source.randrange(_VOCABULARY) for _ in range(num)]
