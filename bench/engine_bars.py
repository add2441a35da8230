"""The bars of the engine against transformers, measured in a child process on one core."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.bar import Bar, BarsFailed, ratio_of_medians
from bench.statistics import median

NUM_STREAMS = 16
PREFILL_TOKENS = 1024
BATCHING_NEEDED = 8.0
DECODE_NEEDED = 1.5
PREFILL_NEEDED = 0.9
_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class EngineSamples:
    """Tokens per second, one number for each repeat.

    Decoding, prefill excluded: one stream, `NUM_STREAMS` of them together, and transformers.generate. Prefill of
    `PREFILL_TOKENS`: the engine, and a bare forward pass of transformers with and without its KV cache.
    `core_share` is the part of each repeat in which the core was ours: well below 1, something else disturbed it.
    """

    one_stream: list[float] = field(default_factory=list)
    many_streams: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    forward_with_cache: list[float] = field(default_factory=list)
    forward_without_cache: list[float] = field(default_factory=list)
    core_share: list[float] = field(default_factory=list)


def engine_bars(samples: EngineSamples) -> list[Bar]:
    """The three bars. Transformers' prefill counts in the faster of its two ways."""
    forward = max(samples.forward_with_cache, samples.forward_without_cache, key=median)
    one, many, generate = (median(s) for s in (samples.one_stream, samples.many_streams, samples.generate))
    return [
        Bar(
            f"decode of {NUM_STREAMS} streams / of one stream",
            ratio_of_medians(samples.many_streams, samples.one_stream),
            BATCHING_NEEDED,
            f"{many:.1f} / {one:.1f} tokens/s",
        ),
        Bar(
            "decode of one stream / transformers.generate",
            ratio_of_medians(samples.one_stream, samples.generate),
            DECODE_NEEDED,
            f"{one:.1f} / {generate:.1f} tokens/s",
        ),
        Bar(
            f"prefill of {PREFILL_TOKENS} tokens / transformers forward",
            ratio_of_medians(samples.prefill, forward),
            PREFILL_NEEDED,
            f"{median(samples.prefill):.0f} / {median(forward):.0f} tokens/s",
        ),
    ]


def measure_engine(
    model_dir: Path, dtype: str, *, core: int, repeats: int, on_progress: Callable[[str], None]
) -> EngineSamples:
    """Runs `bench.engine_samples` pinned to `core`. Raises BarsFailed."""
    command = [sys.executable, "-m", "bench.engine_samples", str(model_dir)]
    command += [f"--dtype={dtype}", f"--core={core}", f"--repeats={repeats}"]
    samples: EngineSamples | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process,
    ):
        deadline = threading.Timer(_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            for line in process.stdout or ():
                event = json.loads(line)
                if "progress" in event:
                    on_progress(event["progress"])
                else:
                    samples = EngineSamples(**event["samples"])
            exit_code = process.wait()
        finally:
            deadline.cancel()
            process.kill()
        if exit_code != 0 or samples is None:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise BarsFailed(f"the engine could not be measured (exit code {exit_code}): {reason}")
    return samples
