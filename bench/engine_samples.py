"""Measures engine and transformers side by side in this process, which pins itself to one core.

Run by bench.engine_bars; writes lines of JSON to standard output: progress, and samples at the end.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM

from bench.bar import BarsFailed
from bench.engine_bars import NUM_STREAMS, PREFILL_TOKENS, EngineSamples
from bench.measurement import batch_rate, time_per_token_s
from bench.prompts import PromptShape, make_prompts
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as EngineSequence
from engine.step_plan import SequenceOutput
from worker.host import DTYPES, WorkerConfig, WorkerHost, load_worker
from worker.state_feed import StateFeed

DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 64
WARMUP_TOKENS = 4
ANSWER_TIMEOUT_S = 120.0


class _TokenTimes:
    """An engine's SequenceSink that notes when each token comes, by `time.perf_counter`."""

    wants_layers = False

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.failure = ""
        self._ended = threading.Event()

    def on_started(self, num_cached_tokens: int) -> None:
        if num_cached_tokens:
            self.failure = f"{num_cached_tokens} prompt tokens came from the prefix cache"

    def on_layer(self, layer: int, start: int, end: int) -> None:
        raise NotImplementedError("this sink wants no layers")

    def on_output(self, output: SequenceOutput) -> None:
        self.times_s += [time.perf_counter()] * len(output.token_ids)
        if output.finish_reason is not None:
            self._ended.set()

    def on_failure(self, message: str) -> None:
        self.failure = message
        self._ended.set()

    def on_handed_back(self) -> None:
        self.on_failure("KV blocks ran out")

    def wait(self) -> list[float]:
        """The times of all tokens. Raises BarsFailed."""
        if not self._ended.wait(ANSWER_TIMEOUT_S):
            raise BarsFailed(f"no end of a sequence within {ANSWER_TIMEOUT_S} s")
        if self.failure:
            raise BarsFailed(self.failure)
        return self.times_s


class OurEngine:
    """The engine as a worker has it."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._num_sequences = 0

    def token_times_s(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[float]]:
        """Generates from all prompts at once; when each one's tokens came."""
        sinks = [self._add(prompt, num_tokens) for prompt in prompts]
        return [sink.wait() for sink in sinks]

    def prefill_rate(self, prompt: list[int]) -> float:
        """Prompt tokens per second until token 0 is sampled."""
        began_at_s = time.perf_counter()
        times_s = self._add(prompt, 1).wait()
        return len(prompt) / (times_s[0] - began_at_s)

    def _add(self, prompt: list[int], num_tokens: int) -> _TokenTimes:
        sink = _TokenTimes()
        self._num_sequences += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        self._host.engine.add(EngineSequence(f"{self._num_sequences}", list(prompt), len(prompt), sampling), sink)
        return sink


class Transformers:
    """The same model as transformers runs it by itself."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype], local_files_only=True)
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # the length is to be exact

    @torch.inference_mode()
    def token_times_s(self, prompt: list[int], num_tokens: int) -> list[float]:
        """Greedy generation; when each token came."""
        times_s = _Streamer()
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        self._model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, streamer=times_s)
        return times_s.times_s[1:]  # the first is the prompt

    @torch.inference_mode()
    def prefill_rate(self, prompt: list[int], *, use_cache: bool) -> float:
        """Prompt tokens per second of one forward pass, with the logits of the last one only."""
        ids = torch.tensor([prompt])
        began_at_s = time.perf_counter()
        self._model(ids, use_cache=use_cache, logits_to_keep=1)
        return len(prompt) / (time.perf_counter() - began_at_s)


class _Streamer:
    """What transformers.generate calls with the prompt, with each token, and at the end."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def take_round(
    ours: OurEngine, theirs: Transformers, prompts: Callable[[int, int], list[list[int]]], num_tokens: int
) -> dict[str, float]:
    """One sample of each kind, by the field of EngineSamples. `prompts` makes new ones: how many, how long."""
    (single,) = prompts(1, DECODE_PROMPT_TOKENS)
    (long,) = prompts(1, PREFILL_TOKENS)
    return {
        "one_stream": _rate(ours.token_times_s([single], num_tokens)[0]),
        "generate": _rate(theirs.token_times_s(single, num_tokens)),
        "many_streams": batch_rate(ours.token_times_s(prompts(NUM_STREAMS, DECODE_PROMPT_TOKENS), num_tokens)),
        "prefill": ours.prefill_rate(long),
        "forward_with_cache": theirs.prefill_rate(long, use_cache=True),
        "forward_without_cache": theirs.prefill_rate(long, use_cache=False),
    }


def _rate(token_times_s: Sequence[float]) -> float:
    per_token_s = time_per_token_s(token_times_s)
    if not per_token_s:
        raise BarsFailed(f"{len(token_times_s)} tokens came, all at once: no rate")
    return 1 / per_token_s


def _tell(event: dict[str, object]) -> None:
    click.echo(json.dumps(event))


async def _load_host(model_dir: Path, dtype: str) -> WorkerHost:
    config = WorkerConfig(
        name="bench",
        role="mixed",
        model_dir=model_dir,
        kernel_cache_dir=user_cache_path("baton") / "kernels",
        dtype=dtype,
    )
    state = StateFeed()
    host = load_worker(config, state, lambda phase: _tell({"progress": f"engine: {phase}"}))
    state.close()  # nobody follows the load here
    return host


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), required=True)
@click.option("--core", type=int, required=True)
@click.option("--repeats", type=click.IntRange(min=1), required=True)
def main(model_dir: Path, dtype: str, core: int, repeats: int) -> None:
    """Measure on one core and write the samples."""
    for thread in os.listdir("/proc/self/task"):  # those to come inherit it
        os.sched_setaffinity(int(thread), (core,))
    torch.set_num_threads(1)
    host = asyncio.run(_load_host(model_dir, dtype))
    _tell({"progress": "loading the model into transformers"})
    ours, theirs = OurEngine(host), Transformers(model_dir, dtype)
    num_made = 0

    def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
        nonlocal num_made
        num_made += 1  # another seed each time: nothing of a prompt may be in the prefix cache
        return make_prompts(num_prompts, PromptShape(num_tokens), vocab_size=host.vocab_size, seed=num_made)

    host.engine.start()
    try:
        _tell({"progress": "warming up"})
        take_round(ours, theirs, prompts, WARMUP_TOKENS)
        samples = EngineSamples()
        for repeat in range(repeats):
            _tell({"progress": f"engine and transformers, round {repeat + 1} of {repeats}"})
            began_at_s, cpu_began_at_s = time.perf_counter(), time.process_time()
            for name, sample in take_round(ours, theirs, prompts, DECODE_TOKENS).items():
                getattr(samples, name).append(sample)
            # One thread or the other computes all the time.
            samples.core_share.append((time.process_time() - cpu_began_at_s) / (time.perf_counter() - began_at_s))
    finally:
        host.engine.stop(timeout_s=ANSWER_TIMEOUT_S)
    _tell({"samples": asdict(samples)})


if __name__ == "__main__":
    main()
