"""Who goes first: first come first served, but what is soon done need not wait for what takes long.

Each job has a due time: its arrival plus `patience` times what it still needs. The earliest due goes first. So jobs of
one size go in the order of their arrival; of those that came together, the one with the most reuse and the least left
goes first; and nobody starves, since a due time never moves back while all later arrivals have later ones.
"""

from dataclasses import dataclass

from reprise.schedule.limits import SchedulerLimits
from reprise.schedule.state import PrefillingJob, SchedulerState, WaitingJob


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """The order of jobs, first to run lowest."""

    gives_way: bool
    """A side request that has not waited for its grace yet."""
    due_s: float
    num_left: int
    arrived_s: float
    id: str


def num_left(job: WaitingJob | PrefillingJob) -> int:
    """How many tokens the job still has to prefill."""
    return job.end - job.position if isinstance(job, PrefillingJob) else job.prompt_len - job.resume_at


def rank(job: WaitingJob | PrefillingJob, state: SchedulerState, limits: SchedulerLimits) -> Rank:
    """Where the job stands among all that wait for prefill."""
    left = num_left(job)
    grace = limits.side_grace_s if job.is_auxiliary else 0.0
    return Rank(
        job.is_auxiliary and state.now_s < job.arrived_s + grace,
        job.arrived_s + grace + limits.patience * left / state.speed.prefill_tokens_per_s,
        left,
        job.arrived_s,
        job.id,
    )


def is_auxiliary_request(*, prompt_len: int, resume_at: int, has_chats: bool, longest: int = 1024) -> bool:
    """Whether a request looks like a title or a tag that a chat front end asks for beside the chat.

    Such a prompt is short and shares little with what is stored. `has_chats`: chats with a history are being served;
    without them nobody is there to give way to.
    """
    return has_chats and prompt_len <= longest and resume_at < prompt_len // 2
