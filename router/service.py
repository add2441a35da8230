"""InferenceService: the client's door."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from engine.text_codec import TextCodec
from router.dispatch import Dispatcher
from router.membership import Membership
from router.outcome import Outcome
from router.validation import Defaults, Limits, PromptRequest, validate

logger = logging.getLogger(__name__)

LONG_REQUEST_BYTES = 32 << 10
DEFAULT_TIMEOUT_S = 600.0  # for clients that set no deadline

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(self, model: str, codec: TextCodec, membership: Membership, dispatcher: Dispatcher) -> None:
        self._model = model
        self._codec = codec
        self._membership = membership
        self._dispatcher = dispatcher

    async def Generate(  # noqa: N802 - the proto's name
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See the proto."""
        outcome = Outcome(time.monotonic())
        defaults = Defaults(request_id=uuid.uuid4().hex, seed=secrets.randbits(64))
        check = partial(
            validate, request, model=self._model, codec=self._codec, limits=self._limits(), defaults=defaults
        )
        # Tokenizing a long text takes a good part of a second, which the other streams must not feel.
        is_long = request.ByteSize() > LONG_REQUEST_BYTES
        prompt = await asyncio.to_thread(check) if is_long else check()
        await context.send_initial_metadata((("x-request-id", prompt.request_id),))
        remaining_s = context.time_remaining()
        timeout_s = DEFAULT_TIMEOUT_S if remaining_s is None else min(remaining_s, DEFAULT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._responses(prompt, outcome, timeout_s)) as responses:
                async for response in responses:
                    yield response
        except TimeoutError:
            raise _too_late(prompt, outcome, timeout_s) from None
        except BatonError as error:
            logger.info("request %s failed: %s %s", prompt.request_id, error.code.name, error.message)
            raise _with_progress(error, outcome) from error
        logger.info("request %s finished: %s", prompt.request_id, _summary(prompt, outcome))

    async def GetModelInfo(  # noqa: N802
        self, request: inference_pb2.GetModelInfoRequest, context: _Context
    ) -> inference_pb2.GetModelInfoResponse:
        """See the proto."""
        infos = self._membership.infos()
        if not infos:
            raise Unavailable("no worker is reachable yet; ask again in a few seconds", retry_after_s=1.0)
        return inference_pb2.GetModelInfoResponse(
            model=self._model,
            context_window_tokens=self._limits().context_window_tokens,
            vocab_size=self._codec.vocab_size,
            dtype=infos[0].fingerprint.kv_dtype,
            model_fingerprint=infos[0].fingerprint.model,
            eos_token_ids=sorted(self._codec.eos_token_ids),
        )

    async def _responses(
        self, prompt: PromptRequest, outcome: Outcome, timeout_s: float
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        detokenizer = self._codec.detokenizer()
        info: inference_pb2.PromptInfo | None = inference_pb2.PromptInfo(num_prompt_tokens=len(prompt.token_ids))
        deadline_at = outcome.arrived_at + timeout_s
        async with aclosing(self._dispatcher.run(prompt, outcome, deadline_at)) as deltas:
            async for token_ids in deltas:
                # A stop token is counted, and told as a token, but is no part of the text.
                text = detokenizer.push(t for t in token_ids if t not in prompt.sampling.stop_token_ids)
                yield inference_pb2.GenerateResponse(prompt_info=info, text=text, token_ids=token_ids)
                info = None
        yield inference_pb2.GenerateResponse(text=detokenizer.finish(), finish=self._finish(prompt, outcome))

    def _finish(self, prompt: PromptRequest, outcome: Outcome) -> inference_pb2.Finish:
        outcome.timeline.e2e_s = outcome.since_arrival_s()
        finish = inference_pb2.Finish(
            reason=outcome.reason,
            usage=request_pb2.Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=outcome.num_tokens,
                prefill_cached_tokens=outcome.prefill_cached_tokens,
                decode_cached_tokens=outcome.decode_cached_tokens,
            ),
            timeline=outcome.timeline,
        )
        if outcome.stop_token_id is not None:
            finish.stop_token_id = outcome.stop_token_id
        return finish

    def _limits(self) -> Limits:
        """What every reachable worker can take; before any is reachable, what the model could."""
        infos = self._membership.infos()
        windows = [i.context_window_tokens for i in infos]
        pools = [i.num_blocks * i.block_size_tokens for i in infos]
        window = min([self._codec.context_window_tokens, *windows])
        return Limits(context_window_tokens=window, kv_pool_tokens=min(pools, default=window))


def _too_late(prompt: PromptRequest, outcome: Outcome, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"request {prompt.request_id} did not end within {timeout_s:.1f} s; {outcome.num_tokens} tokens were generated",
        metadata={"tokens_sent": str(outcome.num_tokens)},
    )


def _with_progress(error: BatonError, outcome: Outcome) -> BatonError:
    error.metadata.setdefault("tokens_sent", str(outcome.num_tokens))
    return error


def _summary(prompt: PromptRequest, outcome: Outcome) -> str:
    t = outcome.timeline
    return (
        f"{len(prompt.token_ids)} prompt tokens, {outcome.num_tokens} generated, ttft {t.ttft_s:.3f} s, "
        f"e2e {t.e2e_s:.3f} s, {t.prefill_worker} -> {t.decode_worker}, {t.kv_bytes} KV bytes"
    )
