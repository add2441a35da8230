"""A worker that prefills and decodes alone, asked directly: what the cluster's answers would be without handoffs."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.answer import MODEL_INFO_TIMEOUT_S
from baton.channel import channel
from baton.errors import InternalError, from_rpc_error
from baton.v1 import inference_pb2, request_pb2, worker_pb2, worker_pb2_grpc
from bench.verify.cases import Case
from bench.verify.comparison import Answer, Divergence, next_divergence
from deploy.errors import ClusterError
from deploy.worker_process import WorkerProcess
from deploy.worker_spec import WorkerSpec
from engine.sampling_params import SamplingParams
from worker.conversion import FINISH_REASONS

STOP_GRACE_S = 5.0

_REASONS = {message: reason.value for reason, message in FINISH_REASONS.items()}


@dataclass(frozen=True, slots=True)
class MixedComparison:
    """Where an answer and the mixed worker's part; `problem` is a difference that is not one of tokens, or empty."""

    divergences: tuple[Divergence, ...] = ()
    problem: str = ""


class MixedWorker:
    """A connection to one mixed worker."""

    def __init__(self, connection: grpc.aio.Channel, timeout_s: float) -> None:
        """`timeout_s` bounds each answer."""
        self._worker: Any = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
        self._decode: Any = worker_pb2_grpc.DecodeServiceStub(connection)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s

    async def check(self, info: inference_pb2.GetModelInfoResponse) -> None:
        """Raises ClusterError unless it runs the cluster's model in the cluster's type; BatonError."""
        try:
            told = await self._worker.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=MODEL_INFO_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        ours = (told.fingerprint.model, told.fingerprint.kv_dtype)
        if ours != (info.model_fingerprint, info.dtype):
            raise ClusterError(
                f"the mixed worker {told.worker} runs model {ours[0]} in {ours[1]}, the cluster says "
                f"{info.model_fingerprint} in {info.dtype}"
            )

    async def compare(self, case: Case, answer: Answer, salt: str) -> MixedComparison:
        """Generates from the same prompt; where a token differs, goes on from the answer's. Raises BatonError."""
        divergences: list[Divergence] = []
        start = 0
        while start < len(answer.token_ids):
            found = next_divergence(answer, await self._continue(case, answer.token_ids[:start], salt), start)
            if not isinstance(found, Divergence):
                return MixedComparison(tuple(divergences), found or "")
            divergences.append(found)
            start = found.index + 1
            if start >= case.sampling.max_tokens:
                break
        return MixedComparison(tuple(divergences))

    async def _continue(self, case: Case, generated: tuple[int, ...], salt: str) -> Answer:
        request = worker_pb2.DecodeRequest(
            request_id="verify",
            token_ids=[*case.token_ids, *generated],
            sampling=_sampling_message(case.sampling),
            stopping=request_pb2.StoppingCriteria(
                max_tokens=case.sampling.max_tokens - len(generated),
                stop_token_ids=sorted(case.sampling.stop_token_ids),
            ),
            cache_salt=salt,
            prefill_locally=True,
        )
        token_ids: list[int] = []
        try:
            async for response in self._decode.Decode(request, timeout=self._timeout_s):
                token_ids += response.tokens.token_ids
                if response.HasField("finished"):
                    return _answer(token_ids, response.finished)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        raise InternalError("the mixed worker's answer ended without its last message", reason="INCOMPLETE_ANSWER")


@asynccontextmanager
async def connect(address: str, timeout_s: float) -> AsyncIterator[MixedWorker]:
    """One that runs, at host:port."""
    async with channel(address, internal=True) as connection:
        yield MixedWorker(connection, timeout_s)


@asynccontextmanager
async def start(
    model_dir: Path, dtype: str, timeout_s: float, on_progress: Callable[[str], None]
) -> AsyncIterator[MixedWorker]:
    """One in this process, all of a worker's services with it, on loopback and on any core; gone in the end."""
    process = WorkerProcess()
    spec = WorkerSpec("mixed-verify", "mixed", str(model_dir), model_dir.name, dtype=dtype)
    place = await process.start(spec, on_progress)
    try:
        async with connect(place.address, timeout_s) as worker:
            yield worker
    finally:
        await process.stop(STOP_GRACE_S)


def _sampling_message(sampling: SamplingParams) -> request_pb2.SamplingParams:
    return request_pb2.SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
    )


def _answer(token_ids: list[int], finished: worker_pb2.DecodeFinished) -> Answer:
    stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
    return Answer(tuple(token_ids), _REASONS.get(finished.reason, "unknown"), stop_token_id)
