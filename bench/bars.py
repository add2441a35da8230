"""`python -m bench.bars`: measures every bar as a ratio within one run on this machine, and says if one is missed."""

import json
import os
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.table import Table

from bench.bar import Bar, BarsFailed
from bench.cluster_bars import cluster_bars, measure_clusters
from bench.command import PIPE_WIDTH
from bench.engine_bars import engine_bars, measure_engine
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import dtype_option, model_option
from engine.model_store import DEFAULT_MODEL_NAME, resolve_model

PARTS = ("engine", "cluster")
MIN_CORE_SHARE = 0.95


@click.command()
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Samples of each number.")
@click.option("--only", type=click.Choice(PARTS), help="The bars against transformers, or those of the handoff.")
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all numbers here.")
@model_option
@dtype_option
@told_in_one_line
def main(*, repeats: int, only: str | None, json_file: TextIO | None, model: Path | None, dtype: str) -> None:
    """Measure the bars of the project, each as a ratio of medians within one run on this machine.

    Every worker has one core to itself. The exit code is 1 if a bar is missed. Other work on the machine makes
    the numbers worthless.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that clusters are stopped
    model_dir = resolve_model(model, on_progress=lambda text: click.echo(text, err=True))
    name = DEFAULT_MODEL_NAME if model is None else model.stem
    try:
        bars, samples = _measure(model_dir, name, dtype, repeats=repeats, parts=(only,) if only else PARTS)
    except BarsFailed as error:
        raise click.ClickException(str(error)) from error
    _show(bars, Console(stderr=json_file is not None and json_file.name == "<stdout>"))
    if json_file is not None:
        settings = {"model": name, "dtype": dtype, "repeats": repeats, "machine": platform.platform()}
        written = {**settings, "bars": [_bar_json(bar) for bar in bars], "samples": samples}
        json_file.write(json.dumps(written, indent=2) + "\n")
    if not all(bar.is_met for bar in bars):
        raise SystemExit(1)


def _measure(
    model_dir: Path, name: str, dtype: str, *, repeats: int, parts: Sequence[str]
) -> tuple[list[Bar], dict[str, Any]]:
    """The bars of these parts, and the samples behind them by part. Raises BarsFailed, ClusterError."""
    began_at_s = time.monotonic()

    def tell(text: str) -> None:
        click.echo(f"[{time.monotonic() - began_at_s:4.0f} s] {text}", err=True)

    bars: list[Bar] = []
    samples: dict[str, Any] = {}
    if "engine" in parts:
        core = max(os.sched_getaffinity(0))  # the first one has the most of the system's own work
        engine = measure_engine(model_dir, dtype, core=core, repeats=repeats, on_progress=tell)
        bars += engine_bars(engine)
        if (share := min(engine.core_share)) < MIN_CORE_SHARE:
            tell(f"warning: other work took {1 - share:.0%} of the core in one round: do not trust these numbers")
        samples["engine"] = asdict(engine)
    if "cluster" in parts:
        cluster = measure_clusters(model_dir, name, dtype, repeats=repeats, on_progress=tell)
        bars += cluster_bars(cluster)
        samples["cluster"] = asdict(cluster)
    return bars, samples


def _show(bars: Sequence[Bar], console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("bar")
    table.add_column("measured", justify="right")
    table.add_column("needed", justify="right")
    table.add_column("verdict")
    table.add_column("medians", style="dim")
    for bar in bars:
        needed = f"{'≤' if bar.is_limit else '≥'} {bar.needed:.2f}"
        verdict = "[green]met[/]" if bar.is_met else "[bold red]missed[/]"
        table.add_row(bar.name, f"{bar.measured:.3f}", needed, verdict, bar.detail)
    console.print(table)


def _bar_json(bar: Bar) -> dict[str, Any]:
    return {**asdict(bar), "is_met": bar.is_met}


if __name__ == "__main__":
    main()
