"""Executes step plans on the model."""

from collections.abc import Callable

import torch

from engine.kv_cache import allocate_kv
from engine.layer_events import LayerEvents
from engine.model import LoadedModel
from engine.native_kernels import NativeKernels
from engine.paged_attention import choose_attention
from engine.sampler import sample
from engine.step_plan import StepPlan, StepResult
from engine.step_tensors import build_step_tensors

OnLayer = Callable[[int], None]


class Runner:
    """One model, its KV blocks and the device they live on. Not thread-safe: one thread runs the steps."""

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, device: torch.device, kernels: NativeKernels | None
    ) -> None:
        """Allocates `num_blocks` KV blocks on `device`."""
        self.model = loaded.model
        self.kv_shape = loaded.kv_shape
        self.device = device
        self.kv = allocate_kv(loaded.kv_shape, num_blocks, device)
        self.attention = choose_attention(self.kv, kernels)
        is_cuda = device.type == "cuda"
        self._layer_events = LayerEvents(torch.cuda.current_stream(device).record_event) if is_cuda else None

    @torch.inference_mode()
    def run(self, plan: StepPlan, on_layer: OnLayer) -> StepResult:
        """Computes the plan's tokens, stores their KV, and samples where the plan says so.

        `on_layer` is called with each layer's index once that layer's keys and values of all tokens of the plan
        are in the blocks: on this thread, or on CUDA on another, perhaps after this call has returned.
        """
        step = build_step_tensors(plan, self.kv_shape.block_size, self.device)
        logits = self.model(
            input_ids=step.input_ids,
            position_ids=step.positions,
            use_cache=False,
            # logits_to_keep 0 would mean all of them; one row is computed and dropped if nothing is sampled.
            logits_to_keep=step.sample_rows if len(step.sample_rows) else 1,
            paged=self.attention,
            step=step,
            on_layer=on_layer if self._layer_events is None else self._layer_events.deferred(on_layer),
        ).logits[0]
        sampled = step.sampled
        if not sampled:
            return StepResult({})
        positions = [s.start + len(s.token_ids) for s in sampled]
        tokens = sample(logits, [s.sampling for s in sampled], positions)
        return StepResult({s.sequence_id: token for s, token in zip(sampled, tokens, strict=True)})
