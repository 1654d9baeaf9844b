"""What fits into the memory of a machine: chats beside a model's weights, and a model for who has none yet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

CHAT = 32 * 1024
"""The length of the chats that are counted, in tokens: an agent's session is at least so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedModel:
    """A model of the hub, with the bytes of its weights, and of the KV of a token, as its files say."""

    id: str
    nbytes: int
    token_nbytes: int

    def num_chats(self, room: int) -> int:
        """How many chats of `CHAT` tokens `room` bytes hold beside the weights."""
        return max(0, room - self.nbytes) // (CHAT * self.token_nbytes)


SUGGESTED: Sequence[SuggestedModel] = (
    SuggestedModel(id="mlx-community/Qwen3-0.6B-4bit", nbytes=340_000_000, token_nbytes=28 * 2 * 8 * 128 * 2),
    SuggestedModel(id="mlx-community/Qwen3-1.7B-4bit", nbytes=970_000_000, token_nbytes=28 * 2 * 8 * 128 * 2),
    SuggestedModel(
        id="mlx-community/Qwen3-4B-Instruct-2507-4bit", nbytes=2_270_000_000, token_nbytes=36 * 2 * 8 * 128 * 2
    ),
    # Every other layer is a window, and takes next to nothing.
    SuggestedModel(id="mlx-community/gpt-oss-20b-MXFP4-Q8", nbytes=12_100_000_000, token_nbytes=12 * 2 * 8 * 64 * 2),
    SuggestedModel(
        id="mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", nbytes=17_200_000_000, token_nbytes=48 * 2 * 4 * 128 * 2
    ),
    SuggestedModel(id="mlx-community/gpt-oss-120b-MXFP4-Q8", nbytes=63_400_000_000, token_nbytes=18 * 2 * 8 * 64 * 2),
)
"""For coding and chat, from small to large: `reprise models search WORD` finds others."""


def suggestion(room: int) -> SuggestedModel | None:
    """The largest of these beside whose weights `room` bytes hold a chat; None: not even the smallest."""
    fitting = [model for model in SUGGESTED if model.num_chats(room) > 0]
    return fitting[-1] if fitting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChats:
    """What fits beside a model: the longest chat in tokens, up to its context, and how many chats of `CHAT` tokens."""

    longest: int
    num_chats: int
    context: int | None

    @property
    def is_comfortable(self) -> bool:
        """Whether an agent's session fits, or all that the model has."""
        return self.longest >= min(CHAT, self.context or CHAT)

    def __str__(self) -> str:
        of = "" if self.context is None or self.longest < self.context else ", which is all of its context"
        chats = f", or {self.num_chats:,} of {CHAT // 1024}k" if self.num_chats > 1 else ""
        return f"a chat of {self.longest:,} tokens{of}{chats}"


SMALL_MACHINES = (8, 16)
"""Macs by their memory in GB, for which it is said what fits, wherever it is asked."""


def working_set(num_gb: int) -> int:
    """What macOS lets the GPU of such a Mac keep in memory: two thirds, unless `iogpu.wired_limit_mb` says more."""
    return num_gb * 2**30 * 2 // 3


def on_a_small_machine(plain: FittingChats, quantised: FittingChats, raised: FittingChats, *, num_gb: int) -> str:
    """What fits there: plainly, with --kv-bits 8, and with three quarters of the memory for the GPU besides."""
    limit = f"sudo sysctl iogpu.wired_limit_mb={num_gb * 768}"
    if plain.longest == quantised.longest == raised.longest == 0:
        found = suggestion(working_set(num_gb))
        return "the weights leave no room for a chat" + (f"; {found.id} would" if found is not None else "")
    parts = [str(plain) if plain.longest > 0 else "no chat"]
    if quantised.longest > plain.longest:
        parts.append(f"with --kv-bits 8 (approximate) {quantised}")
    if not quantised.is_comfortable and raised.longest > quantised.longest:
        parts.append(f"with `{limit}` too {raised}")
    return "; ".join(parts)


def advice(plain: FittingChats, quantised: FittingChats, *, room: int) -> str:
    """What to do where little fits; `quantised`: what fits with --kv-bits 8. "": nothing."""
    if plain.is_comfortable:
        return ""
    found = suggestion(room)
    other = f"choose a smaller model, such as {found.id}" if found is not None else "choose a smaller model"
    if plain.longest == 0 and quantised.longest == 0:
        return f"{other[0].upper()}{other[1:]}."
    parts: list[str] = []
    if quantised.longest > plain.longest:
        parts.append(f"--kv-bits 8 holds {quantised} (approximate)")
    parts.append("--max-batch 1 leaves the memory to one chat")
    return f"{'; '.join(parts)}; or {other}."
