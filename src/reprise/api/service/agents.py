"""Agents and what they start: which chats wait for which, which have ended, and how sub-agents begin.

All of it is learnt from requests and answers as they come, of each namespace apart, and bounded: an agent that was
forgotten is one like any other chat. Belongs to the event loop's thread.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachetools import FIFOCache

from reprise.api.service.caller import Caller
from reprise.core.job import EndedChat, Lineage
from reprise.core.prompt import Boundary, BoundaryKind, Prompt

_MOST_AGENTS = 256
"""Of one namespace; those that were silent longest are forgotten first."""

_MOST_TOOLS = 256
_LONGEST_NAME = 256
_MOST_BEGINNINGS = 4
"""Of one tool: kinds of sub-agents that it starts."""

_LONGEST = 1 << 16
"""The most tokens of a beginning that is kept."""

_DEEPEST = 8
_AT_ONCE = 2
_WITHOUT_IDS = 2
"""How often a beginning must have followed a tool's calls if no id says that they belong together."""

_HALVED_AT = 64
"""Counts are halved there, so that what a client did long ago is forgotten."""

Key = tuple[str, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _KnownAgent:
    """`calls`: the tools that its last answer called; None while that is being written."""

    parent: Key | None
    first_job: str
    last_job: str
    has_tools: bool
    calls: tuple[str, ...] | None = None
    has_ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Beginning:
    prompt: Prompt
    num_followed: int = 0
    is_certain: bool = False
    """Whether an id has shown that the agent with this beginning was started by the caller of the tool."""


@dataclass(slots=True, kw_only=True, eq=False)
class _CalledTool:
    num_calls: int = 0
    beginnings: dict[bytes, _Beginning] = field(default_factory=dict[bytes, _Beginning])


@dataclass(slots=True, kw_only=True, eq=False)
class _Calling:
    """The latest answer with calls of a caller without ids, until it continues. `own`: how its chat begins."""

    tools: tuple[str, ...]
    own: bytes
    followed: set[bytes] = field(default_factory=set[bytes])


class _KnownNamespace:
    """What is known of the agents of one namespace."""

    def __init__(self) -> None:
        self.agents: FIFOCache[Key, _KnownAgent] = FIFOCache(_MOST_AGENTS)
        """The one that was heard of last is last."""
        self.tools: FIFOCache[str, _CalledTool] = FIFOCache(_MOST_TOOLS)
        self.calling: _Calling | None = None

    def tool(self, name: str) -> _CalledTool:
        tool = self.tools.pop(name, None) or _CalledTool()
        self.tools[name] = tool
        return tool


class Agents:
    """The agents that use one model, by namespace and by what they say of themselves."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _KnownNamespace] = {}

    def arrive(self, caller: Caller, prompt: Prompt, *, job_id: str, has_tools: bool, namespace: str) -> Lineage:
        """Record a request, and say which other chats it tells something about."""
        known = self._namespaces.setdefault(namespace, _KnownNamespace())
        if caller.key is None:
            if not caller.is_side:
                _follow_without_ids(known, prompt)
            return Lineage(is_side=caller.is_side)
        agent = known.agents.get(caller.key)
        if caller.is_side or (agent is not None and agent.has_tools and not has_tools):
            # A session's request without its tools is none of its turns: a title, a summary of a page.
            return Lineage(is_side=True)
        if agent is None:
            agent = _KnownAgent(parent=caller.parent_key, first_job=job_id, last_job=job_id, has_tools=has_tools)
            parent = None if agent.parent is None else known.agents.get(agent.parent)
            if parent is not None and parent.calls:
                _learn(known, parent.calls, prompt, is_certain=True)
        known.agents.pop(caller.key, None)
        known.agents[caller.key] = agent
        agent.last_job, agent.has_tools, agent.calls, agent.has_ended = job_id, has_tools, None, False
        return Lineage(ended=_ended_below(known, caller.key), awaited=_awaited_above(known, agent))

    def expected(self, tool: str, *, namespace: str) -> list[Prompt]:
        """How what the next call of this tool starts will begin."""
        found = self._namespaces[namespace].tools.get(tool[:_LONGEST_NAME]) if namespace in self._namespaces else None
        return [] if found is None else list(_expected(found).values())[:_AT_ONCE]

    def forget(self, namespace: str) -> None:
        """Forget a namespace: nothing of what it has had is to be computed ahead."""
        self._namespaces.pop(namespace, None)

    def answered(self, caller: Caller, prompt: Prompt, tools: Sequence[str], *, namespace: str) -> list[Prompt]:
        """Record the tools that the latest answer to this caller called. Returns how what they start will begin."""
        known = self._namespaces.setdefault(namespace, _KnownNamespace())
        names = tuple(dict.fromkeys(name[:_LONGEST_NAME] for name in tools))
        if caller.key is not None:
            agent = known.agents.get(caller.key)
            if agent is not None:
                agent.calls = names
        elif names:
            known.calling = _Calling(tools=names, own=_digest(prompt))
        found: dict[bytes, Prompt] = {}
        for name in names:
            tool = known.tool(name)
            found |= _expected(tool)
            tool.num_calls += 1
            if tool.num_calls >= _HALVED_AT:
                tool.num_calls //= 2
                for beginning in tool.beginnings.values():
                    beginning.num_followed //= 2
        return list(found.values())[:_AT_ONCE]


def _ended_below(known: _KnownNamespace, key: Key) -> tuple[EndedChat, ...]:
    """The sub-agents of this agent that had finished when it continued. Each is returned once."""
    ended = [
        agent
        for other, agent in known.agents.items()
        if agent.parent == key and other != key and agent.calls == () and not agent.has_ended
    ]
    for agent in ended:
        agent.has_ended = True
    return tuple(EndedChat(first_job=agent.first_job, last_job=agent.last_job) for agent in ended)


def _awaited_above(known: _KnownNamespace, agent: _KnownAgent) -> tuple[str, ...]:
    """The latest jobs of the agents that wait for this one, nearest first."""
    found: list[str] = []
    seen: set[Key] = set()
    above = agent.parent
    while above is not None and above not in seen and len(found) < _DEEPEST:
        seen.add(above)
        parent = known.agents.get(above)
        if parent is None or parent is agent:
            break
        found.append(parent.last_job)
        above = parent.parent
    return tuple(found)


def _follow_without_ids(known: _KnownNamespace, prompt: Prompt) -> None:
    """A request without ids: it continues the chat whose calls are open, or begins one that they started."""
    calling, key = known.calling, _digest(prompt)
    if calling is None:
        return
    if key == calling.own:
        known.calling = None
    elif key not in calling.followed and len(calling.followed) < _MOST_BEGINNINGS:
        calling.followed.add(key)
        _learn(known, calling.tools, prompt, is_certain=False)


def _learn(known: _KnownNamespace, tools: Sequence[str], prompt: Prompt, *, is_certain: bool) -> None:
    """A request with this prompt came right after calls of these tools."""
    at = _beginning_at(prompt)
    if not 0 < at <= _LONGEST:
        return
    key = _digest(prompt)
    for name in tools:
        beginnings = known.tool(name).beginnings
        # The one that followed latest is last.
        beginning = beginnings.pop(key, None) or _Beginning(prompt=_cut(prompt, at))
        beginnings[key] = beginning
        beginning.num_followed += 1
        beginning.is_certain |= is_certain
        if len(beginnings) > _MOST_BEGINNINGS:
            del beginnings[next(iter(beginnings))]


def _expected(tool: _CalledTool) -> dict[bytes, Prompt]:
    """What at least every second call of the tool was followed by, the latest first."""
    latest = reversed(tool.beginnings.items())
    return {
        key: each.prompt
        for key, each in latest
        if each.num_followed >= (1 if each.is_certain else _WITHOUT_IDS) and 2 * each.num_followed >= tool.num_calls
    }


def _beginning_at(prompt: Prompt) -> int:
    """Where the system prompt and the tools end; 0 if that is not known."""
    return max((b.position for b in prompt.boundaries if b.kind is BoundaryKind.SYSTEM), default=0)


def _cut(prompt: Prompt, at: int) -> Prompt:
    return prompt.up_to(at, [Boundary(at, BoundaryKind.SYSTEM)])


def _digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.tokens[: _beginning_at(prompt)].tobytes(), digest_size=16).digest()
