"""`reprise bench`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import as_file, files
from pathlib import Path
from platform import machine, platform, python_version
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer
from rich.console import Console
from typer import Option

from reprise.cli.installation import check_mlx
from reprise.cli.refuse import refusals, refuse
from reprise.lab.progress import ProgressLine

if TYPE_CHECKING:
    from reprise.lab.bench.results import BenchResult
    from reprise.lab.bench.run import BenchPlan
    from reprise.lab.bench.sides import Side

_MLX_LM = "mlx-lm"
_BESIDE = 1.3
"""The memory of a server, as a multiple of its weights."""


def bench(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A local model directory or a Hugging Face repository id. Default: the demo's small model.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float, Option(min=0.05, max=10_000, help="Time limit in minutes. Sizes and repeats are chosen to fit.")
    ] = 5.0,
    vs: Annotated[
        list[str] | None,
        Option(
            metavar="URL|mlx-lm",
            help="Compare with this OpenAI-compatible server, or with mlx_lm.server, which is started too. Repeatable.",
        ),
    ] = None,
    vs_model: Annotated[
        str | None, Option(help="Model to request from the server at --vs URL, if it serves several.")
    ] = None,
    vs_key: Annotated[str | None, Option(help="API key for --vs URL.", show_default=False)] = None,
    only: Annotated[
        list[str] | None, Option("--workload", metavar="NAME", help="Run only this workload. Repeatable.")
    ] = None,
    size: Annotated[
        float | None, Option(min=0.01, max=1000, help="Size of the workloads. Default: chosen to fit the time.")
    ] = None,
    repeats: Annotated[int | None, Option(min=1, help="Number of repeats. Default: as many as fit the time.")] = None,
    seed: Annotated[int, Option(help="Seed for the texts.")] = 0,
    one_at_a_time: Annotated[
        bool | None,
        Option(
            "--one-at-a-time/--together",
            help="Run one server at a time, or all together, taking turns. Default: together if memory allows.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        Option(exists=True, help="Replay this recording of `reprise serve --record`, or agent sessions, instead."),
    ] = None,
    live: Annotated[int, Option(min=1, help="With --replay: how many agent sessions are under way together.")] = 1,
    fast: Annotated[
        bool, Option("--fast", help="With --replay: as fast as possible instead of at the recorded times.")
    ] = False,
    html: Annotated[Path, Option(dir_okay=False, help="The report.")] = Path("reprise-bench.html"),
    numbers: Annotated[Path, Option("--json", dir_okay=False, help="The numbers.")] = Path("reprise-bench.json"),
) -> None:
    """Measure reuse on your model and machine: the same requests with reuse, without it, and on other servers.

    Starts the servers, runs chats, agent loops and bursts against them, and writes a report of tokens computed and time
    waited. `reprise bench --minutes 1` needs no model.
    """
    check_mlx()
    from reprise.lab.bench.run import BenchPlan  # noqa: PLC0415
    from reprise.lab.bench.sides import OFF, ON, MlxLmSide, RepriseSide, Side, UrlSide  # noqa: PLC0415
    from reprise.lab.bench.workloads import WORKLOADS, Size  # noqa: PLC0415

    for file in (html, numbers):
        if not file.absolute().parent.is_dir():
            refuse(f"Cannot write {file}: there is no directory {file.absolute().parent}.")
    known = {workload.name: workload for workload in WORKLOADS}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        refuse(f"Unknown workload {unknown[0]!r}. Choose from {', '.join(known)}.")
    again = ["reprise", "bench", *(() if model is None else (model,)), "--minutes", f"{minutes:g}"]
    for flag, values in (("--vs", vs), ("--workload", only)):
        again += [word for value in values or () for word in (flag, value)]
    again += [] if vs_model is None else ["--vs-model", vs_model]
    again += [] if one_at_a_time is None else ["--one-at-a-time" if one_at_a_time else "--together"]
    progress = ProgressLine(Console(stderr=True))
    with as_file(files("reprise.lab.demo") / "model") as demo_model, refusals(), progress.of("bench"):
        path = str(demo_model) if model is None else model
        # A recording names the model of the server that it was made on.
        options = () if replay is None else ("--any-model",)
        sides: list[Side] = [RepriseSide(ON, path, *options), RepriseSide(OFF, path, "--no-prefix-cache", *options)]
        for peer in vs or ():
            sides.append(MlxLmSide(path) if peer == _MLX_LM else UrlSide(peer, model=vs_model, key=vs_key))
        if replay is not None:
            result = _replayed(replay, sides, again, minutes=minutes, is_fast=fast, num_live=live, tell=progress.tell)
        else:
            num_local = sum(not isinstance(side, UrlSide) for side in sides)
            plan = BenchPlan(
                minutes=minutes,
                workloads=tuple(known[name] for name in only) if only else WORKLOADS,
                seed=seed,
                size=None if size is None else Size(factor=size),
                num_repeats=repeats,
                takes_turns=_fit_together(path, num_local) if one_at_a_time is None else not one_at_a_time,
            )
            result = _held(plan, sides, again, tell=progress.tell)
    if model is None:
        result = replace(result, head={**result.head, "model": "the demo model, included with Reprise"})
    _show(result, html, numbers)


def _held(
    plan: "BenchPlan", sides: "Sequence[Side]", again: list[str], *, tell: Callable[[str], None]
) -> "BenchResult":
    from reprise.lab.bench.results import BenchResult  # noqa: PLC0415 (quick start)
    from reprise.lab.bench.run import Bench  # noqa: PLC0415

    held = Bench(plan=plan, sides=sides, tell=tell)
    held.hold()
    fit = held.fit
    assert fit is not None
    sized = ["--size", f"{fit.size.factor:g}", "--repeats", str(fit.num_repeats), "--seed", str(plan.seed)]
    how = "all servers at once, taking turns" if plan.takes_turns else "one server at a time"
    return BenchResult(
        head={**_head(held.about, join([*again, *sized])), "servers": how},
        sides=tuple(side.name for side in sides),
        workloads=tuple((workload.name, workload.about) for workload in fit.workloads),
        runs=tuple(held.runs),
        memory=held.memory,
        notes=tuple(held.notes),
    )


def _replayed(
    file: Path,
    sides: "Sequence[Side]",
    again: list[str],
    *,
    minutes: float,
    is_fast: bool,
    num_live: int,
    tell: Callable[[str], None],
) -> "BenchResult":
    from reprise.lab.bench.replay import NAME, ReplayBench, calls_of_sessions, read_recording  # noqa: PLC0415
    from reprise.lab.bench.results import BenchResult  # noqa: PLC0415 (quick start)
    from reprise.lab.simulate.sessions import holds_sessions  # noqa: PLC0415

    is_sessions = holds_sessions(file)
    calls, num_dropped = (calls_of_sessions(file, num_live=num_live), 0) if is_sessions else read_recording(file)
    held = ReplayBench(calls=calls, sides=sides, minutes=minutes, is_fast=is_fast, tell=tell)
    held.hold()
    how = "as fast as possible" if is_fast else "at the recorded times"
    if num_dropped > 0:
        held.notes.append(f"{file} lacks {num_dropped} requests that were not recorded in time.")
    if any(call.body is None for call in calls):
        held.notes.append("The recording has no text: prompts are generated with the same lengths and shared blocks.")
    played = [*(("--live", str(num_live)) if is_sessions else ()), *(("--fast",) if is_fast else ())]
    return BenchResult(
        head=_head(held.about, join([*again, "--replay", str(file), *played])),
        sides=tuple(side.name for side in sides),
        workloads=((NAME, f"{len(calls)} calls of {file.name}, {how}"),),
        runs=tuple(held.runs),
        memory=held.memory,
        notes=tuple(held.notes),
    )


def _show(result: "BenchResult", html: Path, numbers: Path) -> None:
    """The table, and the files."""
    from reprise.lab.bench.report import as_html, as_json, head_lines, summary_lines, table_of  # noqa: PLC0415

    console = Console() if sys.stdout.isatty() else Console(width=100)
    for line in (*head_lines(result.head), ""):
        console.print(line, highlight=False, markup=False)
    console.print(table_of(result))
    for line in (*summary_lines(result), *result.notes):
        console.print(line, highlight=False, markup=False)
    try:
        html.write_text(as_html(result), encoding="utf-8")
        numbers.write_text(json.dumps(as_json(result), indent=1), encoding="utf-8")
    except OSError as error:
        refuse(f"Cannot write the report: {error}.")
    console.print(f"Wrote the report to {html} and the numbers to {numbers}.", highlight=False, markup=False)


def _fit_together(model: str, num: int) -> bool:
    """Whether `num` servers of this model fit into memory together; False if its size is not known."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    from reprise.cli.process_limits import weights_nbytes  # noqa: PLC0415

    directory = Path(model).expanduser()
    if not directory.is_dir():
        with suppress(HFValidationError):
            found = try_to_load_from_cache(model, "config.json")
            if not isinstance(found, str):
                return False
            directory = Path(found).parent
    nbytes = weights_nbytes(directory)
    return 0 < _BESIDE * nbytes * num <= psutil.virtual_memory().available


def _head(about: Mapping[str, Any], command: str) -> dict[str, Any]:
    """What was measured, where, and how to repeat it."""
    size = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB"
    return {
        "model": about.get("model") or "unknown",
        "architecture": about.get("architecture"),
        "layers": about.get("layers"),
        "context": about.get("context"),
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("mlx-reprise", "mlx", "mlx-lm")),
        "python": python_version(),
        "machine": f"{platform()}, {machine()}, {size}",
        "device": _device(),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "command": command,
    }


def _device() -> str:
    """The device that MLX uses."""
    from reprise.engine.memory import computing_device  # noqa: PLC0415 (imports MLX)

    try:
        return computing_device()
    except RuntimeError:
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
