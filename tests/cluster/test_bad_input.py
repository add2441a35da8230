"""Bad input gets a clear error with the right status, and disturbs nobody else."""

import grpc
import pytest

from baton.errors import InvalidRequest, ModelNotFound
from baton.v1 import inference_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

GENERATE = "/baton.v1.InferenceService/Generate"
BAD = [
    ("", {}, InvalidRequest, ["empty"]),
    ([], {}, InvalidRequest, ["empty"]),
    ([{"role": "assistant"}], {}, InvalidRequest, ["content"]),
    ([1] * 8000, {"max_tokens": 193}, InvalidRequest, ["8000", "193", "8192"]),
    ([1] * 8192, {}, InvalidRequest, ["8192"]),
    ("hi", {"model": "gpt-17"}, ModelNotFound, ["gpt-17", "smollm2"]),
    ("hi", {"temperature": -0.5}, InvalidRequest, ["-0.5"]),
    ("hi", {"temperature": float("nan")}, InvalidRequest, ["nan"]),
    ("hi", {"top_p": 0.0}, InvalidRequest, ["top_p"]),
    ("hi", {"top_p": 1.5}, InvalidRequest, ["1.5"]),
    ("hi", {"max_tokens": 0}, InvalidRequest, ["max_tokens"]),
    ([0, 49152], {}, InvalidRequest, ["49152"]),
    ([0, -1], {}, InvalidRequest, ["-1"]),
    ("x \ud83d y", {}, InvalidRequest, ["text"]),
    ("word " * 300_000, {}, InvalidRequest, ["bytes"]),
]


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """A neighbour that runs beside all of these, and what it says alone."""
    options = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}
    with cluster.client() as client, client.generate("1, 2, 3, 4, 5,", **options) as alone:
        alone.read()
    with cluster.client() as client, client.generate("1, 2, 3, 4, 5,", **options) as stream:
        next(iter(stream))
        yield
        stream.read()
    assert stream.token_ids == alone.token_ids


@pytest.mark.parametrize(("prompt", "options", "error", "words"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(cluster, undisturbed, prompt, options, error, words):
    with cluster.client() as client, pytest.raises(error) as raised:
        client.generate(prompt, **{"max_tokens": 4, **options}).read()
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("size", [17 << 20, 5 << 20])
def test_a_message_over_a_limit_leaves_the_channel_usable(cluster, undisturbed, size):
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString)
        with pytest.raises(grpc.RpcError) as raised:
            list(call(inference_pb2.GenerateRequest(text="x" * size).SerializeToString(), timeout=20))
        assert raised.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        request = inference_pb2.GenerateRequest(text="The capital of France is")
        request.stopping.max_tokens = 1
        request.sampling.temperature = 0
        answers = list(call(request.SerializeToString(), timeout=20))
    assert "".join(a.text for a in answers) == " Paris"


def test_text_that_is_not_utf8(cluster, undisturbed):
    torn = b"\x1a\x02\xf0\x9f"  # field 3, text: the first half of an emoji
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString)
        with pytest.raises(grpc.RpcError) as raised:
            list(call(torn, timeout=20))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in raised.value.details()
