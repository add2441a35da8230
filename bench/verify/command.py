"""`baton verify`."""

import asyncio
import json
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console
from transformers.utils import logging as transformers_logging

from bench.command import PIPE_WIDTH
from bench.verify.ledger import LedgerCheck, WorkerPlace, check_ledgers
from bench.verify.report import Report, report_json
from bench.verify.verification import Settings, Target, verify_answers
from bench.verify.view import print_report, progress_view
from deploy.cluster_record import RecordStore
from deploy.cluster_status import ClusterStatus
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import address_option, model_option, name_option, router_address
from deploy.lifecycle import cluster_status
from engine.model_store import resolve_model


@click.command(context_settings={"show_default": True})
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, help="Longest answer.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="Seconds for an answer.")
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all findings here.")
@model_option
@address_option
@name_option
@told_in_one_line
def verify(
    *,
    max_tokens: int,
    timeout: float,
    json_file: TextIO | None,
    model: Path | None,
    address: str | None,
    name: str,
) -> None:
    """Compare a running cluster's answers with a mixed worker's and with transformers', token for token.

    Asks chats, texts and token ids, at the edges of KV blocks, with unicode, greedy and seeded; each twice, so that
    the second finds the prefix caches. The same model is then run here: by a mixed worker, that prefills and decodes
    by itself (the cluster's own if it has one beside its pairs), and by transformers, in the cluster's type and in
    float32, one after the other.

    A token that differs is a near-tie if rounding explains it: if the other token is as good within the error that
    the type allows a logit. Everything else is WRONG, as are wrong ends, counts and texts. With bfloat16 a few
    near-ties are usual, with float32 hardly any.

    In the end every worker's ledger of KV blocks must be clean within 2 s: free + cached = total, nothing owned,
    in flight, repaired or in quarantine, no open ticket. Requests of others meanwhile hold blocks too: verify a
    cluster that has nothing else to do. With --address the workers are not known, and no ledger is read.

    The model is the one that --model names, as for `baton up`; it must be the one that the cluster serves.

    The exit code is 1 if an answer is wrong or missing, or a ledger is not clean.

    \b
    Examples:
      baton verify
      baton verify --name other --model ~/models/Qwen3-0.6B
      baton verify --address 10.0.0.5:8000 --model ~/models/Qwen3-0.6B
      baton verify --json - | jq .verdict
    """
    transformers_logging.disable_progress_bar()
    target = _target(model, address, name)
    with progress_view(_console(stderr=True)) as progress:
        info, answers = verify_answers(target, Settings(max_tokens, timeout), progress)
        progress.begin("reading the ledgers")
        ledgers = None if address else _ledgers(name)
    report = Report(info.model, info.dtype, answers, ledgers)
    console = _console(stderr=json_file is not None and json_file.name == "<stdout>")
    console.print(f"\n{info.model} in {info.dtype} at {target.address}\n", highlight=False, soft_wrap=True)
    print_report(report, console)
    if json_file is not None:
        json_file.write(json.dumps(report_json(report), indent=2, allow_nan=False) + "\n")
    if not report.is_good:
        raise SystemExit(1)


def mixed_worker_address(status: ClusterStatus) -> str:
    """Where a mixed worker is that the router leaves alone, since there are a prefill and a decode worker; or nothing.

    Without such a pair the mixed workers answer themselves, and comparing them with each other tells little.
    """
    ready = {worker.role: worker.report.address for worker in status.workers if worker.is_ready}
    return ready.get("mixed", "") if {"prefill", "decode"} <= ready.keys() else ""


def worker_places(status: ClusterStatus) -> list[WorkerPlace]:
    """Where the workers' ledgers are to be read."""
    return [
        WorkerPlace(
            worker.name,
            worker.report.address if worker.report.state.is_up else "",
            f"{worker.report.state.value} {worker.report.detail}".strip(),
        )
        for worker in status.workers
    ]


def _target(model: Path | None, address: str | None, name: str) -> Target:
    router = router_address(name, address)
    mixed_address = "" if address else mixed_worker_address(cluster_status(RecordStore().load(name)))
    model_dir = resolve_model(model, on_progress=lambda text: click.echo(text, err=True))
    return Target(router, model_dir, mixed_address)


def _ledgers(name: str) -> list[LedgerCheck]:
    # Asked for anew: a worker that was restarted meanwhile has another address.
    return asyncio.run(check_ledgers(worker_places(cluster_status(RecordStore().load(name)))))


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
