"""Planted bugs in where requests go, and in what becomes of those whose replica is lost."""

from tools.mutants.mutant import Mutant

_ROUTING = ("tests/deploy/test_routing.py",)
_FRONT = ("tests/deploy/test_front.py",)
_REPLICA = ("tests/deploy/test_replica.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


DEPLOY_MUTANTS = (
    _mutant(
        "ranked",
        "what was sent since a replica was asked does not count",
        "offer.ttft_s + sent.get(replica, _NOTHING).work_s",
        "offer.ttft_s",
        _ROUTING,
    ),
    _mutant(
        "_by_load_and_reuse",
        "what is reused outweighs any load where times are alike",
        "candidate.num_requests <= least + _EVEN",
        "True",
        _ROUTING,
    ),
    _mutant(
        "SentWork.since",
        "what is on its way when a replica is asked does not count",
        "asked_s - _UNSEEN_S",
        "asked_s",
        _ROUTING,
    ),
    _mutant(
        "_Response.send",
        "a comment that keeps a stream alive counts as an answer",
        'is_stream(self._sent) and body.startswith(b":") and not is_last',
        "False",
        _FRONT,
    ),
    _mutant(
        "_Response.send",
        "a stream goes on with a response that is none",
        "_form(self._start) != _form(self._sent)",
        "False",
        _FRONT,
    ),
    _mutant(
        "ReplicaServer.leave",
        "a replica that stops does not end its answers",
        "self._ending.answers_s",
        "1e6",
        _REPLICA,
    ),
)
