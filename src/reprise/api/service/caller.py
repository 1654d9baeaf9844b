"""Who sends a request: the ids of session and agent that clients send of their own accord.

They are read and never needed, and mean something only within the namespace of their API key. What a client sends there
is bounded in length, and compared but never interpreted.

Claude Code sends `x-claude-code-session-id`, of sub-agents `x-claude-code-agent-id` with the id of the agent that
started them (`x-claude-code-parent-agent-id`, absent if that is the main one), and where it is asked to
`x-claude-code-request-class`. Before 2.1.268 its session is in `metadata.user_id`, as JSON or behind `_session_`. Codex
sends `session-id` and `thread-id`, of sub-agents `x-codex-parent-thread-id`, and the same in `client_metadata`.
OpenCode sends `x-session-id`, of sub-agents `x-parent-session-id`, Qwen Code `x-qwen-code-session-id`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

_MOST_CHARS = 256
_SHOWN = 12
"""Characters of an id in a name."""

_SESSION_HEADERS = (
    "x-claude-code-session-id",
    "x-qwen-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-opencode-session",
    "x-session-affinity",
)
_THREAD_HEADERS = ("thread-id", "thread_id")
_PARENT_HEADERS = ("x-codex-parent-thread-id", "x-parent-session-id")
_SIDE_CLASSES = frozenset({"auxiliary"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One agent of a client. `session` None: the client says nothing of itself.

    `agent` and `parent` are ids as the client writes them, None for the main agent. `is_side`: the client says that
    this request belongs to no chat (a title, a quota check).
    """

    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    is_side: bool = False

    @property
    def key(self) -> tuple[str, str] | None:
        """What tells this agent from others of its namespace; None: nothing is known."""
        return None if self.session is None else (self.session, self.agent or "")

    @property
    def parent_key(self) -> tuple[str, str] | None:
        """The `key` of the agent that started this one; None: this is the main one, or nothing is known."""
        return None if self.session is None or self.agent is None else (self.session, self.parent or "")

    @property
    def name(self) -> str | None:
        """Session and agent for people, as far as they are known."""
        if self.session is None:
            return None
        # Many ids begin with the time: those of agents that were started together differ at their ends.
        return self.session[:_SHOWN] if self.agent is None else f"{self.session[:_SHOWN]} / {self.agent[-_SHOWN:]}"


UNKNOWN = Caller()


def caller_of(headers: Mapping[str, str]) -> Caller:
    """The caller that the headers name. Ids that are empty, too long or not printable count as absent."""
    session = _first(headers, *_SESSION_HEADERS)
    is_side = headers.get("x-claude-code-request-class") in _SIDE_CLASSES
    agent = _id(headers.get("x-claude-code-agent-id"))
    if session is not None and agent is not None:
        parent = _id(headers.get("x-claude-code-parent-agent-id"))
        return Caller(session=session, agent=agent, parent=parent, is_side=is_side)
    return _of_thread(session, _first(headers, *_THREAD_HEADERS), _first(headers, *_PARENT_HEADERS), is_side=is_side)


def with_body(caller: Caller, fields: object) -> Caller:
    """The caller, named by `metadata` or `client_metadata` of its body where its headers do not."""
    if caller.session is not None or not isinstance(fields, Mapping):
        return caller
    known = cast(Mapping[str, Any], fields)
    session = _id(known.get("session_id")) or _session_in(known.get("user_id"))
    parent = _id(known.get("parent_thread_id"))
    return _of_thread(session, _id(known.get("thread_id")), parent, is_side=caller.is_side)


def _of_thread(session: str | None, thread: str | None, parent: str | None, *, is_side: bool) -> Caller:
    """A caller whose sub-agents have a thread or session of their own, and name the one that started them."""
    own = session if thread is None else thread
    if own is None:
        return Caller(is_side=is_side)
    if parent is None or parent == own:
        return Caller(session=own, is_side=is_side)
    # Where the session is the sub-agent's own, the parent's names both.
    root = session if session is not None and session != own else parent
    return Caller(session=root, agent=own, parent=None if parent == root else parent, is_side=is_side)


def _session_in(user_id: object) -> str | None:
    """The session in Claude Code's `metadata.user_id`."""
    if not isinstance(user_id, str) or len(user_id) > 4 * _MOST_CHARS:
        return None
    if user_id.startswith("{"):
        try:
            fields: Any = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        return _id(cast(Mapping[str, Any], fields).get("session_id")) if isinstance(fields, dict) else None
    return _id(user_id.partition("_session_")[2])


def _first(headers: Mapping[str, str], *names: str) -> str | None:
    return next((found for name in names if (found := _id(headers.get(name))) is not None), None)


def _id(value: object) -> str | None:
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARS or not value.isprintable():
        return None
    return value.strip() or None
