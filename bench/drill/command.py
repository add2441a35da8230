"""`baton drill`."""

import functools
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console

from bench.drill.cancel_scenario import CancelOptions, run_cancels
from bench.drill.message_scenario import MESSAGES_SHAPE, MessageOptions, run_messages
from bench.drill.overload_scenario import OverloadOptions, run_overload
from bench.drill.questions import QuestionShape
from bench.drill.result import findings_json
from bench.drill.runner import Scenario, run_drill
from bench.drill.screen import Screen
from bench.drill.soak_scenario import SoakOptions, run_soak
from bench.drill.strike_scenario import StrikeOptions, run_strikes
from bench.drill.strikes import ROLES, Phase, Strike, plan_strikes
from deploy.cluster_spec import DTYPES
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import cluster_spec, model_option

_PHASES = {phase.name.lower().replace("_", "-"): phase for phase in Phase}
_probability = click.FloatRange(0, 1)
_positive = click.FloatRange(min=0, min_open=True)

_repeat_option = click.option("--repeat", type=click.IntRange(min=1), default=10, help="Times each phase is struck.")
_phase_option = click.option(
    "--phase", "phases", type=click.Choice(list(_PHASES)), multiple=True, help="Only this; may be repeated."
)
_victim_option = click.option("--victim", "victims", type=click.Choice(ROLES), multiple=True, help="Only this role.")
_requests_help = "Requests that are sent."


@click.group(chain=True, no_args_is_help=True, context_settings={"show_default": True})
@click.option("--prefill", type=click.IntRange(min=1), default=2, help="Prefill workers.")
@click.option("--decode", type=click.IntRange(min=1), default=2, help="Decode workers.")
@click.option("--streams", type=click.IntRange(min=1), default=8, help="Requests under way at all times.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of everything that is left to chance.")
@click.option("--kv-memory-mb", type=click.IntRange(min=1), default=256, help="KV cache per worker.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", help="What to compute in.")
@model_option
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all numbers here.")
def drill(**options: object) -> None:
    """Hurt a cluster while it works, and check everything that must hold.

    Starts a cluster of its own, runs one scenario after the other against it, and leaves nothing behind. Every
    answer is compared with that of the undisturbed cluster, token by token; afterwards no KV block, no sequence and
    no process may be left. The exit code is 1 if anything is not as it must be.

    In float32 answers are exact. In bfloat16 two tokens that are nearly equally likely may change places.

    \b
    Examples:
      baton drill kill                             kill workers in every phase of a request
      baton drill kill --repeat 1 --phase pushed
      baton drill --streams 16 freeze messages cancel
      baton drill --json soak.json soak --minutes 20
    """


@drill.result_callback()
@told_in_one_line
def _run(
    scenarios: Sequence[Scenario],
    *,
    seed: int,
    streams: int,
    kv_memory_mb: int,
    model: Path | None,
    json_file: TextIO | None,
    **workers: Any,
) -> None:
    for scenario in scenarios:
        if min(workers["prefill"], workers["decode"]) < scenario.workers_needed:
            raise click.UsageError(
                f"{scenario.name} needs {scenario.workers_needed} workers of each role: one goes on while one is lost"
            )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cluster is stopped
    spec = cluster_spec(
        model,
        name="drill",
        num_prefill=workers["prefill"],
        num_decode=workers["decode"],
        dtype=workers["dtype"],
        kv_memory_bytes=kv_memory_mb << 20,
        allow_faults=True,
    )
    console = Console(stderr=json_file is not None and json_file.name == "<stdout>")
    found = run_drill(spec, scenarios, Screen(console), seed=seed, num_streams=streams)
    if json_file is not None:
        settings = {"model": spec.model_name, "seed": seed, "streams": streams, "kv_memory_mb": kv_memory_mb, **workers}
        json_file.write(json.dumps(findings_json(found, settings), indent=2) + "\n")
    if any(findings.violations for _, findings in found):
        raise SystemExit(1)


@drill.command()
@_repeat_option
@_phase_option
@_victim_option
def kill(*, repeat: int, phases: Sequence[str], victims: Sequence[str]) -> Scenario:
    """Kill workers (SIGKILL) in every phase of a request."""
    return _strikes(StrikeOptions("kill", _plan(repeat, phases, victims)))


@drill.command()
@_repeat_option
@_phase_option
@_victim_option
@click.option("--resume-after", type=_positive, help="Seconds until a frozen worker goes on. [default: never]")
def freeze(*, repeat: int, phases: Sequence[str], victims: Sequence[str], resume_after: float | None) -> Scenario:
    """Freeze workers (SIGSTOP) in every phase of a request."""
    return _strikes(StrikeOptions("freeze", _plan(repeat, phases, victims), resume_after))


@drill.command()
@click.option("--requests", type=click.IntRange(min=1), default=400, help=_requests_help)
@click.option("--drop", type=_probability, default=0.01, help="Share of KV messages that get lost.")
@click.option("--corrupt", type=_probability, default=0.01, help="Share that is damaged.")
@click.option("--duplicate", type=_probability, default=0.01, help="Share that arrives twice.")
def messages(*, requests: int, drop: float, corrupt: float, duplicate: float) -> Scenario:
    """Lose, damage and double KV messages.

    A prompt travels in about one message for 23 tokens in float32, and the router tries a request only so often:
    with much more than the default shares, some requests must fail.
    """
    if drop + corrupt + duplicate > 1:
        raise click.UsageError("--drop, --corrupt and --duplicate are more than 1 together")
    options = MessageOptions(requests, drop, corrupt, duplicate)
    return Scenario("messages", functools.partial(run_messages, options=options), shape=MESSAGES_SHAPE)


@drill.command()
@click.option("--requests", type=click.IntRange(min=1), default=1000, help=_requests_help)
@click.option("--probes", type=click.IntRange(min=0), default=20, help="Cancels in mid-prefill, one at a time.")
def cancel(*, requests: int, probes: int) -> Scenario:
    """Cancel requests at every moment of their lives."""
    options = CancelOptions(requests, probes)
    shape = QuestionShape((20, 2000), (8, 64))
    return Scenario("cancel", functools.partial(run_cancels, options=options), 8, shape)


@drill.command()
@click.option("--minutes", type=_positive, default=20.0, help="How long.")
@click.option("--cancel-share", type=_probability, default=0.15, help="Share of requests that are cancelled.")
@click.option("--strike-every", type=_positive, default=60.0, help="Seconds between two workers lost.")
def soak(*, minutes: float, cancel_share: float, strike_every: float) -> Scenario:
    """Mixed load for long, with cancels; a worker is killed or frozen now and then."""
    options = SoakOptions(minutes, cancel_share, strike_every)
    return Scenario("soak", functools.partial(run_soak, options=options), workers_needed=2)


@drill.command()
@click.option("--deadline-factor", type=_positive, default=3.0, help="Deadline, in medians of an unloaded answer.")
@click.option("--rate-factor", type=_positive, default=3.0, help="Arrivals, in answers at capacity.")
@click.option("--capacity-seconds", type=_positive, default=60.0, help="How long the capacity is measured.")
@click.option("--overload-seconds", type=_positive, default=120.0, help="How long the overload lasts.")
def overload(
    *, deadline_factor: float, rate_factor: float, capacity_seconds: float, overload_seconds: float
) -> Scenario:
    """Offer several times more requests than can be answered in time."""
    options = OverloadOptions(deadline_factor, rate_factor, capacity_seconds, overload_seconds)
    shape = QuestionShape((options.prompt_tokens,) * 2, (options.output_tokens,) * 2)
    return Scenario("overload", functools.partial(run_overload, options=options), 16, shape)


def _strikes(options: StrikeOptions) -> Scenario:
    return Scenario(options.name, functools.partial(run_strikes, options=options), workers_needed=2)


def _plan(repeat: int, phases: Sequence[str], victims: Sequence[str]) -> Callable[[int], Sequence[Strike]]:
    return functools.partial(plan_strikes, repeat, [_PHASES[name] for name in phases] or list(Phase), victims or ROLES)
