"""Which message a chat template refused: found by rendering the chat's beginnings."""

from collections.abc import Callable, Sequence

from reprise.chat.request import Message
from reprise.core.errors import TemplateFailed

Complaint = Callable[[Sequence[Message]], str | None]
"""What the template says against these messages; None: it takes them."""


def refused_message(messages: Sequence[Message], complaint: Complaint, *, sentence: str) -> int | None:
    """The first message that makes the template say `sentence`; None where no single message does.

    A shorter chat may be refused for another reason (it has no user message yet), which is not counted. O(log n)
    renderings, for n messages.
    """
    # The shortest beginning `messages[:stop]` that is refused in these words; the whole chat is.
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        if complaint(messages[:middle]) == sentence:
            bad = middle
        else:
            good = middle
    # What the chat lacks as a whole is the fault of no message: then it is missed from the first one on.
    is_missed = bad == 1 and (len(messages) == 1 or complaint(messages[1:]) == sentence)
    return None if is_missed else bad - 1


def explained(failed: TemplateFailed, messages: Sequence[Message], complaint: Complaint) -> TemplateFailed:
    """The same failure in words that say where they come from and which message they mean."""
    sentence = str(failed)
    at = refused_message(messages, complaint, sentence=sentence)
    where = "" if at is None else f" at messages[{at}] (role {str(messages[at].get('role'))!r})"
    if not sentence.endswith((".", "!", "?")):
        sentence += "."
    told = TemplateFailed(
        f"The model's chat template refused the chat{where}: {sentence}",
        param="messages" if at is None else f"messages[{at}]",
    )
    told.__cause__ = failed
    return told
