import pytest

from bench.drill.questions import QuestionShape, make_questions
from engine.text_codec import TextCodec

SHAPE = QuestionShape((40, 600), (16, 64))


@pytest.fixture(scope="module")
def encode(model_dir):
    return TextCodec.from_directory(model_dir).encode


def test_lengths_reach_from_end_to_end(encode):
    questions = make_questions(12, SHAPE, encode, seed=0)
    lengths = [len(question.token_ids) for question in questions]
    assert (min(lengths), max(lengths)) == (40, 600)
    assert lengths == sorted(lengths)
    outputs = [question.max_tokens for question in questions]
    assert (min(outputs), max(outputs)) == (16, 64)
    assert [question.number for question in questions] == list(range(12))


def test_a_seed_gives_the_same_questions_again(encode):
    assert make_questions(4, SHAPE, encode, seed=3) == make_questions(4, SHAPE, encode, seed=3)
    assert make_questions(4, SHAPE, encode, seed=3) != make_questions(4, SHAPE, encode, seed=4)


def test_some_are_sampled_and_most_are_greedy(encode):
    questions = make_questions(12, SHAPE, encode, seed=0)
    sampled = [question for question in questions if question.temperature]
    assert len(sampled) == 3
    assert len({question.seed for question in sampled}) == 3


def test_no_two_begin_with_the_same_block(encode):
    questions = make_questions(12, SHAPE, encode, seed=0)
    assert len({question.token_ids[:16] for question in questions}) == 12


def test_one_question_of_one_length(encode):
    (question,) = make_questions(1, QuestionShape((50, 50), (24, 24)), encode, seed=0)
    assert (len(question.token_ids), question.max_tokens) == (50, 24)


def test_long_prompts_are_made_too(encode):
    assert len(make_questions(2, QuestionShape((20, 2000), (8, 64)), encode, seed=1)[1].token_ids) == 2000
