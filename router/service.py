"""InferenceService: the client's door."""

import asyncio
import logging
import secrets
import time
import uuid
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from baton.answer import REQUEST_ID_KEY
from baton.errors import BatonError, Cancelled, DeadlineExceeded, FieldViolation, InvalidRequest, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from engine.text_codec import TextCodec
from router.dispatch import Dispatcher
from router.membership import Membership
from router.outcome import Outcome
from router.reply import CLIENT_STALL_LIMIT_S, Reply
from router.router_metrics import RouterMetrics
from router.running_requests import RunningRequest, RunningRequests
from router.stop_strings import AnswerText, StopScanner
from router.validation import Defaults, Limits, PromptRequest, check_fields, tokenize

logger = logging.getLogger(__name__)

LONG_REQUEST_BYTES = 32 << 10
MAX_TOKENIZING = 2  # long requests at once: more would only slow each other, and the event loop
DEFAULT_TIMEOUT_S = 600.0  # for clients that set no deadline

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self,
        model: str,
        codec: TextCodec,
        membership: Membership,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        client_stall_limit_s: float = CLIENT_STALL_LIMIT_S,
    ) -> None:
        """A client that takes nothing of its answer for `client_stall_limit_s` loses it, see `Reply`."""
        self._metrics = metrics
        self._model = model
        self._codec = codec
        self._membership = membership
        self._dispatcher = dispatcher
        self._client_stall_limit_s = client_stall_limit_s
        self._running = RunningRequests()
        self._tokenizing = asyncio.Semaphore(MAX_TOKENIZING)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """See the proto."""
        outcome = Outcome(time.monotonic())
        self._metrics.note_arrival()
        error: BaseException | None = None
        try:
            await self._answer(request, context, outcome)
        except BaseException as ended:
            error = ended
            raise
        finally:
            self._metrics.note_end(outcome, error)

    async def _answer(self, request: inference_pb2.GenerateRequest, context: _Context, outcome: Outcome) -> None:
        timeout_s = _timeout_s(context)
        check_fields(request, model=self._model, vocab_size=self._codec.vocab_size, limits=self._limits())
        self._dispatcher.check_room()
        running = RunningRequest(request.request_id or uuid.uuid4().hex)
        async with Reply(context.write, self._client_stall_limit_s, running.end) as reply:
            try:
                with self._running.entered(running):
                    await _greet(context, running.request_id)
                    prompt = await self._generate(request, running, outcome, timeout_s, reply)
                await reply.flush()
            except BatonError as error:
                logger.info("request %s failed: %s %s", running.request_id, error.code.name, error.message)
                error.metadata["tokens_sent"] = str(reply.num_tokens_sent)
                raise
            except asyncio.CancelledError:
                logger.info("request %s was cancelled after %d tokens", running.request_id, reply.num_tokens_sent)
                raise
        logger.info("request %s finished: %s", running.request_id, _summary(prompt, outcome))

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: _Context
    ) -> inference_pb2.AbortResponse:
        """See the proto. Knows the requests of this router only."""
        if not request.request_id:
            what = "is empty; say which request to abort: the id you gave it, or got as x-request-id"
            raise InvalidRequest(f"request_id {what}", violations=[FieldViolation("request_id", what)])
        return inference_pb2.AbortResponse(num_aborted=self._running.abort(request.request_id))

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

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        running: RunningRequest,
        outcome: Outcome,
        timeout_s: float,
        reply: Reply,
    ) -> PromptRequest:
        """Gives the whole answer to `reply`. When this ends the workers hold nothing of the request any more."""
        deadline_at = outcome.arrived_at + timeout_s
        try:
            with running:
                async with asyncio.timeout_at(deadline_at):
                    prompt = await self._tokenized(request, running.request_id)
                    outcome.num_prompt_tokens = len(prompt.token_ids)
                    text = self._answer_text(prompt, request.stopping)
                    await self._dispatch(prompt, text, outcome, deadline_at, reply)
                    return prompt
        except TimeoutError:
            raise DeadlineExceeded(
                f"request {running.request_id} did not end within {timeout_s:.1f} s; "
                f"{outcome.num_tokens} tokens were generated"
            ) from None

    async def _tokenized(self, request: inference_pb2.GenerateRequest, request_id: str) -> PromptRequest:
        """The request, ready to be dispatched; raises ResourceExhausted before the work if the queue is full.

        From the last look at the queue until a short request is in it nobody else has a turn, so that a burst
        is refused where the limit is.
        """
        defaults = Defaults(request_id=request_id, seed=secrets.randbits(64))
        work = partial(tokenize, request, codec=self._codec, limits=self._limits(), defaults=defaults)
        self._dispatcher.check_room()
        if request.ByteSize() <= LONG_REQUEST_BYTES:
            return work()
        # Tokenizing a long text takes a good part of a second, which the other streams must not feel.
        async with self._tokenizing:
            self._dispatcher.check_room()
            return await asyncio.to_thread(work)

    def _answer_text(self, prompt: PromptRequest, stopping: request_pb2.StoppingCriteria) -> AnswerText:
        # A stop token is counted, and told as a token, but is no part of the text.
        scanner = StopScanner(stopping.stop, includes_stop=stopping.include_stop_in_output)
        return AnswerText(self._codec.detokenizer(), scanner, prompt.sampling.stop_token_ids)

    async def _dispatch(
        self, prompt: PromptRequest, text: AnswerText, outcome: Outcome, deadline_at: float, reply: Reply
    ) -> None:
        info: inference_pb2.PromptInfo | None = inference_pb2.PromptInfo(num_prompt_tokens=len(prompt.token_ids))
        meter = self._metrics.token_meter()
        try:
            async with aclosing(self._dispatcher.run(prompt, outcome, deadline_at)) as deltas:
                async for token_ids in deltas:
                    meter.note(len(token_ids), time.monotonic())
                    own_ids, piece = text.push(token_ids)
                    reply.add(inference_pb2.GenerateResponse(prompt_info=info, text=piece, token_ids=own_ids))
                    info = None
                    if text.matched is not None:
                        outcome.finish_at(text.matched, num_surplus_tokens=len(token_ids) - len(own_ids))
                        self._dispatcher.note_stopped(outcome)
                        break  # which ends the workers' calls
        except BatonError:
            await reply.flush()  # what there is comes before the error
            raise
        rest = text.finish()
        if outcome.stop_text is None and text.matched is not None:
            outcome.finish_at(text.matched)
        reply.add(inference_pb2.GenerateResponse(text=rest, finish=self._finish(prompt, outcome)))

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
        if outcome.stop_text is not None:
            finish.stop_text = outcome.stop_text
        return finish

    def _limits(self) -> Limits:
        """What every reachable worker can take; before any is reachable, what the model could."""
        infos = self._membership.infos()
        windows = [i.context_window_tokens for i in infos]
        pools = [i.num_blocks * i.block_size_tokens for i in infos]
        window = min([self._codec.context_window_tokens, *windows])
        return Limits(context_window_tokens=window, kv_pool_tokens=min(pools, default=window))


def _timeout_s(context: _Context) -> float:
    """Seconds the request has from now on. Raises DeadlineExceeded if there are none."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return DEFAULT_TIMEOUT_S
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline was over when the request arrived")
    return min(remaining_s, DEFAULT_TIMEOUT_S)


async def _greet(context: _Context, request_id: str) -> None:
    try:
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
    except grpc.aio.BaseError as error:
        raise Cancelled("the client went away before its request began", reason="CLIENT_GONE") from error


def _summary(prompt: PromptRequest, outcome: Outcome) -> str:
    t = outcome.timeline
    return (
        f"{len(prompt.token_ids)} prompt tokens, {outcome.num_tokens} generated, ttft {t.ttft_s:.3f} s, "
        f"e2e {t.e2e_s:.3f} s, {t.prefill_worker} -> {t.decode_worker}, {t.kv_bytes} KV bytes"
    )
