import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton import errors
from baton.channel import channel, sync_channel
from baton.errors import BatonError, FieldViolation, InvalidRequest, Unavailable, from_rpc_error, to_status

TYPES = [
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DataLoss, grpc.StatusCode.DATA_LOSS),
    (errors.Aborted, grpc.StatusCode.ABORTED),
    (errors.Unimplemented, grpc.StatusCode.UNIMPLEMENTED),
    (errors.InternalError, grpc.StatusCode.INTERNAL),
]


def service(fail):
    """A service with this method only."""

    def add(server):
        handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", handlers)])

    return add


def raising(error: BatonError):
    async def fail(request, context):
        await errors.abort(context, error)

    return service(fail)


async def call(address: str) -> BatonError:
    async with channel(address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await connection.unary_unary("/test.Service/Fail")(b"", timeout=10)
        return from_rpc_error(caught.value)


@pytest.mark.parametrize(("kind", "code"), TYPES)
async def test_an_error_arrives_as_it_was_raised(serve, kind, code):
    sent = kind(
        "no room for 5 blocks",
        reason="POOL_FULL",
        retry_after_s=1.25,
        violations=[FieldViolation("a.b", "is 5"), FieldViolation("c", "é")],
        metadata={"stage": "decode", "worker": "decode-0"},
    )
    if kind is errors.ModelNotFound:
        sent.reason = "MODEL_NOT_FOUND"
    received = await call(await serve(raising(sent)))
    assert vars(received) == vars(sent)
    assert type(received) is kind
    assert received.code is code


async def test_the_sync_client_sees_the_same_error(serve):
    address = await serve(raising(Unavailable("no worker", retry_after_s=0.5)))

    def call_sync():
        with sync_channel(address) as connection, pytest.raises(grpc.RpcError) as caught:
            connection.unary_unary("/test.Service/Fail")(b"", timeout=10)
        return from_rpc_error(caught.value)

    received = await asyncio.to_thread(call_sync)
    assert isinstance(received, Unavailable)
    assert (received.message, received.retry_after_s) == ("no worker", 0.5)


async def test_a_long_error_still_has_its_code(serve):
    """With details beyond the trailers' limit the client would see RESOURCE_EXHAUSTED."""
    long = "é" * 20_000
    violations = [FieldViolation(f"field{i}", long) for i in range(50)]
    received = await call(await serve(raising(InvalidRequest(long, violations=violations, metadata={"k": long}))))
    assert isinstance(received, InvalidRequest)
    assert received.message.startswith("éé")
    assert received.message.endswith("…")


texts = st.text(st.characters(), max_size=600)  # surrogates included


@given(texts, st.lists(texts, max_size=20), st.dictionaries(texts, texts, max_size=3))
def test_details_are_below_1_kb(message, descriptions, metadata):
    violations = [FieldViolation("field", d) for d in descriptions]
    error = InvalidRequest(message, violations=violations, metadata=metadata, retry_after_s=1)
    status = to_status(error)
    ((_, details),) = status.trailing_metadata
    assert len(details) < 1000
    assert len(status.details.encode()) <= 400
    assert status.details == status_pb2.Status.FromString(details).message


def test_details_are_google_rpc_messages():
    error = InvalidRequest("bad", retry_after_s=2, violations=[FieldViolation("top_p", "is 2")])
    ((_, details),) = to_status(error).trailing_metadata
    info, retry, bad = status_pb2.Status.FromString(details).details
    expected_info = error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="baton")
    assert info.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    assert error_details_pb2.ErrorInfo.FromString(info.value) == expected_info
    assert error_details_pb2.RetryInfo.FromString(retry.value).retry_delay.seconds == 2
    (violation,) = error_details_pb2.BadRequest.FromString(bad.value).field_violations
    assert (violation.field, violation.description) == ("top_p", "is 2")


async def test_a_foreign_code_becomes_internal_and_is_named(serve):
    async def fail(request, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")

    received = await call(await serve(service(fail)))
    assert type(received) is errors.InternalError
    assert received.message == "UNAUTHENTICATED: no key"


async def test_broken_details_do_not_hide_code_and_message(serve):
    async def fail(request, context):
        await context.abort(grpc.StatusCode.ABORTED, "half-way", (("grpc-status-details-bin", b"\xff\xff"),))

    received = await call(await serve(service(fail)))
    assert (type(received), received.message) == (errors.Aborted, "half-way")


async def test_nobody_listening_is_unavailable():
    received = await call("127.0.0.1:1")
    assert isinstance(received, Unavailable)


def test_the_first_place_told_stays():
    error = Unavailable("gone", retry_after_s=1).at(stage="prefill", worker="prefill-0")
    assert error.message == str(error) == "prefill-0: gone"
    assert error.metadata == {"stage": "prefill", "worker": "prefill-0"}
    assert error.retry_after_s == 1
    assert error.at(stage="dispatch", worker="router").message == "prefill-0: gone"


@pytest.mark.parametrize(("text", "cut"), [("abc", "abc"), ("abcdef", "ab…"), ("éééé", "é…"), ("a\ud83d", "a?")])
def test_text_is_cut_between_characters(text, cut):
    assert errors.cut(text, 5) == cut
