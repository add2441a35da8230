"""Chooses the next token from logits."""

import numpy as np
import torch

from engine.sampling_params import SamplingParams


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    """One token id per row. `logits` [rows, vocab]; `positions`: where in its sequence each new token will stand.

    Greedy rows take the most likely token. Other rows draw by inversion of the cumulative distribution, after
    temperature, top-k and top-p in that order, with one uniform number from Philox (Salmon et al. 2011) keyed by
    (seed, position): what is drawn for a position depends on nothing else.
    """
    logits = logits.float()
    # numpy's argmax is several times as fast as torch's on the CPU; both take the first of equals.
    tokens = logits.numpy().argmax(axis=-1).tolist() if logits.device.type == "cpu" else logits.argmax(dim=-1).tolist()
    for row, (sampling, position) in enumerate(zip(params, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row] = _draw(logits[row], sampling, uniform(sampling.seed, position))
    return [int(token) for token in tokens]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of (seed, position) alone. `seed` in [0, 2**64)."""
    generator = np.random.Generator(np.random.Philox(key=[np.uint64(seed), np.uint64(position)]))
    return float(generator.random())


def _draw(logits: torch.Tensor, sampling: SamplingParams, number: float) -> int:
    """`logits` [vocab] float32; `number` in [0, 1) picks where the cumulative distribution passes it."""
    vocab = logits.shape[-1]
    # Shifted before the division, so that a tiny temperature cannot overflow to infinity.
    scaled = (logits - logits.max()).double() / sampling.temperature
    k = min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab
    # Stable order: equal logits keep the order of their ids wherever they are sampled.
    values, order = scaled.sort(descending=True, stable=True)
    probabilities = torch.softmax(values[:k], dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    if sampling.top_p < 1.0:
        kept = int((cumulative - probabilities < sampling.top_p).sum())  # those that start below top_p
        cumulative = cumulative[: max(kept, 1)]
    index = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    return int(order[min(index, len(cumulative) - 1)])
