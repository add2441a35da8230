"""`baton bench`."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.aio_client import AsyncClient
from baton.v1 import inference_pb2
from bench.arrivals import poisson_arrivals
from bench.load import Load, closed_loop, open_loop
from bench.measurement import Measurement
from bench.prompts import PromptShape, make_prompts
from bench.report import make_report, report_json
from bench.report_view import print_report
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import address_option, name_option, router_address

PIPE_WIDTH = 160
_DEFAULT_CONCURRENCY = 4

_OnDone = Callable[[Measurement], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be measured; the options of the command by the same names."""

    concurrency: int | None
    rate: float | None
    num_requests: int
    prompt_tokens: int
    shared_prefix_tokens: int
    output_tokens: int
    warmup: int
    seed: int
    timeout: float

    def __str__(self) -> str:
        pace = f"{self.rate:g} arriving per second" if self.rate else f"{self.concurrency} at a time"
        shared = f" ({self.shared_prefix_tokens} shared)" if self.shared_prefix_tokens else ""
        lengths = f"{self.prompt_tokens} prompt tokens{shared} and {self.output_tokens} output tokens"
        return f"{self.num_requests} requests, {pace}, {lengths} each"


@click.command(context_settings={"show_default": True})
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help=f"Closed loop: so many requests under way at all times.  [default: {_DEFAULT_CONCURRENCY}]",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PER_SECOND",
    help="Open loop: Poisson arrivals, whether or not earlier requests are answered.",
)
@click.option("--num-requests", type=click.IntRange(min=1), default=32, help="Measured requests.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=256, help="Length of each prompt.")
@click.option(
    "--shared-prefix-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="So many tokens are the same at the beginning of all prompts; the rest is different in each.",
)
@click.option("--output-tokens", type=click.IntRange(min=1), default=64, help="Exact length of each answer.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Requests before, not counted.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the prompts and of the arrivals.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="Seconds for a request.")
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all numbers here.")
@address_option
@name_option
@told_in_one_line
def bench(*, json_file: TextIO | None, address: str | None, name: str, **options: float) -> None:
    """Measure a running cluster under load.

    Prompts are random tokens, different in each request, so that a prefix cache does not help unless asked for.
    The exit code is 1 if no request was answered.

    \b
    Examples:
      baton bench --concurrency 16 --num-requests 64
      baton bench --rate 2 --prompt-tokens 1024 --output-tokens 128
      baton bench --prompt-tokens 1024 --shared-prefix-tokens 768
      baton bench --json - | jq .client.ttft_s
    """
    settings = _settings(**options)
    measurements, model = asyncio.run(_run(router_address(name, address), settings))
    report = make_report(measurements)
    console = Console(stderr=json_file is not None and json_file.name == "<stdout>")
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(f"{model}: {settings}\n", highlight=False, soft_wrap=True)
    print_report(report, console)
    if json_file is not None:
        written = {"model": model, "settings": asdict(settings), **report_json(report, measurements)}
        json_file.write(json.dumps(written, indent=2) + "\n")
    if not report.num_completed:
        raise SystemExit(1)


def _settings(**options: float) -> Settings:
    settings = Settings(**options)  # type: ignore[arg-type]  # the options have the names and types of its fields
    if settings.rate is not None and settings.concurrency is not None:
        raise click.UsageError("--rate is an open loop, --concurrency a closed one: give one of them")
    if settings.shared_prefix_tokens >= settings.prompt_tokens:
        raise click.UsageError(
            f"--shared-prefix-tokens {settings.shared_prefix_tokens} must be below "
            f"--prompt-tokens {settings.prompt_tokens}"
        )
    if settings.rate is None and settings.concurrency is None:
        return Settings(**{**options, "concurrency": _DEFAULT_CONCURRENCY})  # type: ignore[arg-type]
    return settings


async def _run(address: str, settings: Settings) -> tuple[list[Measurement], str]:
    async with AsyncClient(address) as client:
        info = await client.model_info()
        prompts = _prompts(settings, info)
        # New in each run: what an earlier one left in the prefix caches is of no use to this one.
        salt = f"bench-{secrets.token_hex(8)}"
        with _progress(settings) as (on_warm, on_done):
            warmup = Load(client, settings.output_tokens, salt, settings.timeout, on_warm)
            await closed_loop(warmup, prompts[: settings.warmup], settings.concurrency or _DEFAULT_CONCURRENCY)
            load = Load(client, settings.output_tokens, salt, settings.timeout, on_done)
            return await _paced(load, prompts[settings.warmup :], settings), info.model


async def _paced(load: Load, prompts: list[list[int]], settings: Settings) -> list[Measurement]:
    if settings.rate is not None:
        return await open_loop(load, prompts, poisson_arrivals(settings.rate, len(prompts), settings.seed))
    return await closed_loop(load, prompts, settings.concurrency or _DEFAULT_CONCURRENCY)


def _prompts(settings: Settings, info: inference_pb2.GetModelInfoResponse) -> list[list[int]]:
    num_tokens = settings.prompt_tokens + settings.output_tokens
    if num_tokens > info.context_window_tokens:
        raise click.UsageError(
            f"--prompt-tokens {settings.prompt_tokens} and --output-tokens {settings.output_tokens} are {num_tokens} "
            f"together, the context window of {info.model} is {info.context_window_tokens}"
        )
    return make_prompts(
        settings.warmup + settings.num_requests,
        PromptShape(settings.prompt_tokens, settings.shared_prefix_tokens),
        vocab_size=info.vocab_size,
        seed=settings.seed,
        excluded_ids=set(info.eos_token_ids),
    )


@contextmanager
def _progress(settings: Settings) -> Iterator[tuple[_OnDone, _OnDone]]:
    """What to call after each request of the warm-up and of the measurement; shown on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        warm = progress.add_task("Warming up", total=settings.warmup, visible=settings.warmup > 0)
        run = progress.add_task("Measuring", total=settings.num_requests)
        num_failed = 0

        def on_done(measurement: Measurement) -> None:
            nonlocal num_failed
            num_failed += bool(measurement.failure)
            description = f"Measuring [red]({num_failed} failed)[/]" if num_failed else "Measuring"
            progress.update(run, advance=1, description=description)

        yield lambda _: progress.update(warm, advance=1), on_done
