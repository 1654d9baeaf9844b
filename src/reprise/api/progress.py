"""A long prefill in the log: a line every few seconds, so that a busy server does not look dead."""

from dataclasses import dataclass

EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class PrefillProgress:
    """Says when a line is due. Pure: the clock is the caller's, in seconds."""

    request_id: str
    since_s: float
    """When the prefill began, or when somebody last heard of it."""
    position: int = 0
    """Where it stood then."""

    def line(self, *, position: int, total: int, now_s: float) -> str | None:
        """What to log now that `position` of `total` tokens are computed; None before it is time, and at the end."""
        if position <= self.position or now_s - self.since_s < EVERY_S or position >= total:
            return None
        rate = (position - self.position) / (now_s - self.since_s)
        self.since_s, self.position = now_s, position
        left_s = (total - position) / rate
        share = 100 * position // total
        return (
            f"{self.request_id}: prefilled {position} of {total} tokens ({share} %), {rate:.0f} tokens/s, "
            f"about {left_s:.0f} s left"
        )

    def restart(self, *, position: int, now_s: float) -> None:
        """The prefill begins at `position`."""
        self.since_s, self.position = now_s, position
