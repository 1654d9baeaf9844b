"""Planted bugs in what keeps one client from others: bodies, connections, threads, signals, the machine's memory."""

from tools.mutants.mutant import Mutant

_CONNECTIONS = ("tests/api/test_hostile_connections.py",)
_LARGE_BODIES = ("tests/api/test_large_bodies.py",)
_OFF_LOOP = ("tests/api/test_off_loop.py",)
_BACKGROUND = ("tests/api/test_background.py",)
_STOPPING = ("tests/api/test_stopping.py",)
_STRICT_JSON = ("tests/api/test_strict_json.py",)
_EXTREMES = ("tests/engine/test_extremes.py",)
_MACHINE = ("tests/loop/test_following_machine.py",)
_MODELS = ("tests/api/test_models.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


_SETTLING = ("tests/api/test_settling.py",)
_LOADING = (*_STOPPING, "-k", "is_loading")
_ALIASES = ("tests/api/test_model_aliases.py",)

API_MUTANTS = (
    _mutant(
        "ChatService.called",
        "how sub-agents begin is computed behind the answer that starts them",
        "job_id = reply.choices[0].job_id",
        "job_id = None",
        tests=("tests/workloads/test_sub_agents.py", "-k", "written"),
    ),
    _mutant(
        "inherited_listener",
        "a server takes the socket that was passed to another process",
        'environment.pop("LISTEN_PID", None) == str(os.getpid())',
        'environment.pop("LISTEN_PID", None) is not None',
        tests=("tests/api/test_activation.py",),
    ),
    _mutant(
        "_summary_request",
        "the turn after a compaction is settled as if the summary were an answer",
        "replace(request, next_chat=next_chat)",
        "request",
        tests=("tests/api/test_compact.py",),
    ),
    _mutant(
        "Models.asked",
        "a request that names none of several models is answered by the first",
        "len(self.all) > 1",
        "False",
        tests=("tests/api/test_models.py", "-k", "has_to_be_named"),
    ),
    _mutant(
        "EventHub._look",
        "an idle server that is watched sends its counters twice a second",
        "counters.keys() - _OWN_TRACES",
        "counters.keys()",
        tests=("tests/api/test_watching.py", "-k", "watching_an_idle"),
    ),
    _mutant(
        "ModelEngine.may_end",
        "a server that stops waits for weights that are being read",
        "return self._is_ending",
        "return self._is_ending and not self.is_loading",
        _LOADING,
    ),
    _mutant(
        "Settling.num_forgotten",
        "a clear ends what is being rendered in other namespaces",
        "self._num_forgotten[namespace]",
        "self._num_forgotten.total()",
        _SETTLING,
    ),
    _mutant(
        "ServedModel.is_ready",
        "an alias answers with what it knew of other weights",
        "self.fingerprint == self.backend.fingerprint",
        "True",
        ("tests/api/test_models.py", "-k", "other_weights"),
    ),
    _mutant(
        "Models.by_engine",
        "what aliases share is counted for each",
        "model.engine not in found",
        "found.setdefault(model.id, model)",
        (*_ALIASES, "-k", "counted_once"),
    ),
    _mutant(
        "BodyLimits._read",
        "large bodies together fill the memory",
        "self.num_held + len(chunk) > _MAX_TOGETHER * self._max_bytes",
        "False",
        _LARGE_BODIES,
    ),
    _mutant(
        "Connection.why_overdue",
        "half a body holds its connection for ever",
        "now_s - self._quiet_since_s > allowed_s",
        "False",
        _CONNECTIONS,
    ),
    _mutant(
        "Connection.forgive",
        "a client pays for the time in which the server did not look",
        "min(now_s, self._quiet_since_s + late_s)",
        "self._quiet_since_s",
        _CONNECTIONS,
    ),
    _mutant(
        "Connection._refuse",
        "who is refused is cut off while it sends",
        "self.transport.write_eof()",
        "self.transport.close()",
        _CONNECTIONS,
    ),
    _mutant(
        "check_sampling",
        "a number that is none is taken",
        "math.isfinite(value)",
        "True",
        (*_EXTREMES, *_STRICT_JSON),
    ),
    _mutant(
        "Budget.after",
        "pressure without a figure takes nothing",
        "self.nbytes // 10 if reading.is_pressed else 0",
        "0",
        _MACHINE,
    ),
    _mutant(
        "Budget.after",
        "a budget that was reduced never grows again",
        "min(self.most, self.nbytes + spare // 2)",
        "self.nbytes",
        _MACHINE,
    ),
    _mutant(
        "BackgroundAnswer._events_after",
        "who reads on hears the last event twice",
        "at = after + 1",
        "at = max(0, after)",
        _BACKGROUND,
    ),
    _mutant(
        "BodyRoute.get_route_handler",
        "a lookup loads the model's weights",
        "needs is Needs.NOTHING or (needs is Needs.TOKENIZER and model.service is not None)",
        "False",
        (*_MODELS, "-k", "stored_is_shown"),
    ),
    _mutant(
        "clear_cache",
        "who clears one model's cache clears all",
        "context.services(model)",
        "context.services(None)",
        (*_MODELS, "-k", "pins_and_clearing"),
    ),
    _mutant(
        "total_of",
        "the budget of all models is counted for each",
        "_sum(Held, [status.held for status in statuses], budget_nbytes=first.held.budget_nbytes)",
        "_sum(Held, [status.held for status in statuses])",
        ("tests/api/test_metrics.py",),
    ),
    _mutant(
        "ChatService.recorded_as",
        "who asks right after an answer is told that there is no record of it",
        "reply is None or not reply.is_over",
        "reply is None or reply.recording is None",
        ("tests/api/test_records.py",),
    ),
    _mutant(
        "Connection.shutdown",
        "who has sent a part of a head is cut off when the server stops",
        "self._num_received > 0",
        "False",
        ("tests/api/test_stopping.py", "-k", "not_arrived"),
    ),
)
