import pytest

from baton.answer import Answer, Chunk, build_request
from baton.errors import InternalError, InvalidRequest
from baton.v1.inference_pb2 import Finish, GenerateResponse, PromptInfo
from baton.v1.request_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Timeline, Usage


def test_each_kind_of_prompt_sets_its_own_field():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    assert build_request("Hi", {}).text == "Hi"
    assert list(build_request([1, 0], {}).token_ids.ids) == [1, 0]
    assert list(build_request((5,), {}).token_ids.ids) == [5]
    assert [(m.role, m.content) for m in build_request(messages, {}).chat.messages] == [
        ("user", "Hi"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize(("prompt", "field"), [("", "text"), ([], "token_ids")])
def test_an_empty_prompt_is_sent_as_one_for_the_server_to_refuse(prompt, field):
    assert build_request(prompt, {}).WhichOneof("prompt") == field


def test_zero_is_not_unset():
    names = [
        ("sampling", "temperature"),
        ("sampling", "top_k"),
        ("sampling", "top_p"),
        ("sampling", "seed"),
        ("stopping", "max_tokens"),
    ]
    for message, name in names:
        for options, is_set in (({}, False), ({name: None}, False), ({name: 0}, True), ({name: 1}, True)):
            part = getattr(build_request("Hi", options), message)
            assert part.HasField(name) is is_set
            assert getattr(part, name) == (options.get(name) or 0)


def test_the_other_options_arrive():
    request = build_request(
        "Hi",
        {
            "stop_token_ids": [7, 0],
            "ignore_eos": True,
            "model": "m",
            "request_id": "r",
            "cache_salt": "s",
            "priority": -100,
            "timeout_s": 3.0,
        },
    )
    assert list(request.stopping.stop_token_ids) == [7, 0]
    assert request.stopping.ignore_eos
    assert (request.model, request.request_id, request.cache_salt, request.priority) == ("m", "r", "s", -100)


def test_a_priority_of_its_own_is_sent_only_if_there_is_one():
    for options in ({}, {"priority": None}, {"priority": 0}):
        assert build_request("Hi", options) == build_request("Hi", {})


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x \ud83d y", {}, "text"),
        ([{"role": "user", "content": "\ud83d"}], {}, "chat.messages[0].content"),
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": "Hi", "name": "A"}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": "Hi"}, "Hi"], {}, "chat.messages[1]"),
        ([{"role": "user", "content": None}], {}, "chat.messages[0].content"),
        ([1, "a"], {}, "token_ids.ids"),
        ([2**63], {}, "token_ids.ids"),
        ("Hi", {"max_tokens": -1}, "stopping.max_tokens"),
        ("Hi", {"max_tokens": 1.5}, "stopping.max_tokens"),
        ("Hi", {"temperature": "hot"}, "sampling.temperature"),
        ("Hi", {"seed": -1}, "sampling.seed"),
        ("Hi", {"stop_token_ids": [-1]}, "stopping.stop_token_ids"),
        ("Hi", {"cache_salt": "\udc00"}, "cache_salt"),
        ("Hi", {"priority": 2**31}, "priority"),
        ("Hi", {"priority": 0.5}, "priority"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_field(prompt, options, field):
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, options)
    assert [v.field for v in caught.value.violations] == [field]
    assert field in caught.value.message


def test_an_option_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        build_request("Hi", {"temprature": 1})


def test_pieces_add_up_and_the_end_tells_the_rest():
    answer = Answer("r")
    assert answer.fold(GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=5))) is None
    assert answer.fold(GenerateResponse(text="", token_ids=[10813])) == Chunk("", (10813,))
    assert answer.fold(GenerateResponse(text="👍!", token_ids=[235, 231])) == Chunk("👍!", (235, 231))
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.usage) == (
        "👍!",
        [10813, 235, 231],
        None,
        None,
    )
    finish = Finish(
        reason=FINISH_REASON_STOP,
        stop_token_id=0,
        usage=Usage(completion_tokens=4),
        timeline=Timeline(ttft_s=0.25),
    )
    assert answer.fold(GenerateResponse(finish=finish)) is None
    answer.check_finished()
    assert (answer.num_prompt_tokens, answer.finish_reason, answer.stop_token_id) == (5, "stop", 0)
    assert answer.usage.completion_tokens == 4
    assert answer.timeline.ttft_s == 0.25


def test_an_answer_cut_by_length_has_no_stop_token():
    answer = Answer("r")
    answer.fold(GenerateResponse(text="a", token_ids=[1], finish=Finish(reason=FINISH_REASON_LENGTH)))
    assert (answer.finish_reason, answer.stop_token_id) == ("length", None)


def test_an_answer_without_its_end_is_an_error():
    with pytest.raises(InternalError):
        Answer("r").check_finished()


@pytest.mark.parametrize(
    ("stop", "sent"), [(None, []), ([], []), ("end", ["end"]), ("", [""]), (["a", ""], ["a", ""]), (("b",), ["b"])]
)
def test_stop_strings_arrive_one_or_many_and_the_empty_one_for_the_server_to_refuse(stop, sent):
    assert list(build_request("Hi", {"stop": stop}).stopping.stop) == sent


def test_a_stop_string_that_no_message_can_hold_is_refused():
    for stop in ("\ud83d", [7]):
        with pytest.raises(InvalidRequest, match=r"stopping\.stop"):
            build_request("Hi", {"stop": stop})


def test_the_stop_string_is_included_only_if_asked_for():
    assert not build_request("Hi", {}).stopping.include_stop_in_output
    assert build_request("Hi", {"include_stop_in_output": True}).stopping.include_stop_in_output


def test_the_stop_string_that_ended_an_answer_is_told():
    for finish, stop_text in ((Finish(), None), (Finish(stop_text="x"), "x")):
        answer = Answer("r")
        answer.fold(GenerateResponse(finish=finish))
        assert answer.stop_text == stop_text
