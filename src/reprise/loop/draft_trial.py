"""Whether and with which passes a model drafts: tried on this device while nobody waits, before the first draft."""

from __future__ import annotations

import logging
from dataclasses import replace

from reprise.core.clock import Clock
from reprise.core.settings import AUTO, DRAFTS_ALWAYS, DRAFTS_EXACT, NEVER, OFF, Settings
from reprise.drafts.benefit import PASS_SIZES, TRIED_SIZES, PassCosts
from reprise.drafts.drafter import Drafts, EarlierTexts, GroupPasses
from reprise.engine.running.pass_trial import MOST_ROWS, NEAR_TIE, SHORT, PassTrial
from reprise.engine.running.runner import Runner
from reprise.memory import Account, Memory
from reprise.quiet import why_quiet

log = logging.getLogger("reprise.loop")

_MOST_S = 20.0
"""Seconds of passes after which larger ones are not tried."""
_RETRY_S = 10.0
"""How long to wait before checking again whether the machine has room and rest for it."""
_QUIET_S = 1.0
"""How long nothing must have run: behind an answer, what the next turn needs is computed first."""


def make_drafts(runner: Runner, mode: str, *, earlier: EarlierTexts) -> Drafts | None:
    """The drafts of a model; None if they are off or it cannot verify them. `mode`: one of `DRAFT_MODES`.

    Unless they are made always, nothing is drafted until a `DraftTrial` has set the sizes.
    """
    if mode == OFF or never_drafted(runner) is not None:
        return None
    sizes = PASS_SIZES if mode == DRAFTS_ALWAYS else PASS_SIZES[:1]
    return Drafts(rewinds=runner.loaded.blueprint.rewinds, sizes=sizes, earlier=earlier)


def never_drafted(runner: Runner) -> str | None:
    """Why no drafts are made of this model on any device; None: a trial says it."""
    why = runner.why_never_verifies
    return None if why is None else f"not made: {why}"


def drafting_at_once(runner: Runner, settings: Settings, *, clock: Clock) -> str:
    """What is known of drafts on this device, as in /health, by a trial that nothing waits for."""
    drafts = make_drafts(runner, settings.drafts, earlier=lambda namespace: ())
    if drafts is None:
        return never_drafted(runner) or OFF
    trial = DraftTrial(runner, Memory(), drafts, replace(settings, background=NEVER), clock=clock)
    while trial.due_in_s is not None:
        trial.step()
    return trial.verdict


def tolerance_of(mode: str) -> float:
    """By how much logits of a pass that verifies drafts may differ from those of single steps."""
    return 0.0 if mode == DRAFTS_EXACT else NEAR_TIE


class DraftTrial:
    """Sets the sizes of a model's drafts, and what passes of them cost, by a trial that gives way to any request."""

    def __init__(self, runner: Runner, memory: Memory, drafts: Drafts, settings: Settings, *, clock: Clock) -> None:
        self._runner = runner
        self._memory = memory
        self._drafts = drafts
        self._most_rows = settings.max_batch if runner.can_batch else 1
        self._tolerance = tolerance_of(settings.drafts)
        self._background = settings.background
        self._clock = clock
        self._trial: PassTrial | None = None
        self._spent_s = 0.0
        self._next_s = 0.0
        self._is_over = settings.drafts == DRAFTS_ALWAYS
        self.verdict = "always made" if self._is_over else "tried once nothing has run for a second"
        """What is known of drafts on this device, for /health."""

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to do if the server stays idle; None: never."""
        return None if self._is_over else max(0.0, self._next_s - self._clock())

    def postpone(self) -> None:
        """Something else runs: wait until it has been quiet for a while."""
        if not self._is_over:
            self._next_s = max(self._next_s, self._clock() + _QUIET_S)

    def give_up(self) -> bool:
        """Free the memory of the trial, which restarts later. False if there is none."""
        if self._trial is None:
            return False
        self._trial.stop()
        self._trial = None
        self._memory.measure(Account.SEQUENCES, max(0, self._runner.live_nbytes))
        return True

    def step(self) -> bool:
        """Run its next pass. Returns whether it is over and nothing can be drafted."""
        if self.due_in_s != 0:
            return False
        if not self._may_run:
            self.give_up()
            self._next_s = self._clock() + _RETRY_S
            return False
        if self._trial is None:
            self._spent_s = 0.0
            self._drafts.costs = PassCosts(TRIED_SIZES)
            self._drafts.groups.clear()
            self._trial = PassTrial(
                self._runner,
                TRIED_SIZES,
                tolerance=self._tolerance,
                note=self._note,
                clock=self._clock,
                most_rows=self._most_rows,
            )
        trial, started_s = self._trial, self._clock()
        try:
            trial.advance()
        except Exception:
            log.exception("the trial of drafts failed")
            trial.largest, trial.is_over = 1, True
        self._spent_s += self._clock() - started_s
        return self._end(trial) if trial.is_over or self._spent_s > _MOST_S else False

    def _note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        if num_rows > 1:
            self._drafts.groups.setdefault(num_rows, GroupPasses((1,), PassCosts(TRIED_SIZES)))
        self._drafts.group(num_rows).costs.note(num_tokens, seconds)

    @property
    def _may_run(self) -> bool:
        # With `never` it runs all the same: it is asked for once, and drafts are not made in the background.
        if self._background == AUTO and why_quiet(AUTO) is not None:
            return False
        most, live_nbytes = PassTrial.num_positions(self._runner.loaded.context), self._runner.most_live_nbytes
        several = min(self._most_rows, MOST_ROWS) * live_nbytes(2 * SHORT, chunk=SHORT)
        return self._trial is not None or self._memory.fits(max(live_nbytes(most, chunk=SHORT), several))

    def _end(self, trial: PassTrial) -> bool:
        self.give_up()
        self._is_over = True
        largest = trial.largest
        sizes = self._drafts.costs.worthwhile(largest) if largest > 1 else (1,)
        if len(sizes) == 1:
            why = "give the same as single steps" if largest == 1 else "save time"
            self.verdict = f"not made: no passes over several tokens {why} on this device"
            log.info("drafts are %s (see --drafts always)", self.verdict)
            return True
        self._drafts.sizes = sizes
        same = "equal single steps to the last bit" if self._tolerance == 0 else "choose the tokens of single steps"
        costs = ", ".join(f"{size}: {self._drafts.costs.relative(size):.1f}" for size in sizes[1:])
        self.verdict = f"verified in passes of up to {sizes[-1]} tokens, which {same} on this device"
        self.verdict += f" (costs, in single steps: {costs})"
        together: list[int] = []
        for num, most in trial.largest_together.items():
            group = self._drafts.group(num)
            group.sizes = group.costs.worthwhile(most)
            together += [num] if len(group.sizes) > 1 else []
        if together:
            self.verdict += f"; of up to {max(together)} requests at once"
        log.info("drafts are %s", self.verdict)
        return False
