import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.prompts import PromptShape, make_prompts


@given(
    num_prompts=st.integers(0, 20),
    num_tokens=st.integers(1, 40),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_prompts_have_their_length_share_what_they_should_and_nothing_more(num_prompts, num_tokens, seed, data):
    num_shared = data.draw(st.integers(0, num_tokens - 1))
    shape = PromptShape(num_tokens, num_shared)
    prompts = make_prompts(num_prompts, shape, vocab_size=30, seed=seed, excluded_ids={0, 29})
    assert [len(prompt) for prompt in prompts] == [num_tokens] * num_prompts
    assert len({tuple(prompt[:num_shared]) for prompt in prompts}) <= 1
    # No two have the same token after the shared part, so no longer prefix can be the same.
    assert len({prompt[num_shared] for prompt in prompts}) == num_prompts
    assert all(1 <= token_id <= 28 for prompt in prompts for token_id in prompt)


def test_a_seed_fixes_the_prompts():
    def made(seed):
        return make_prompts(3, PromptShape(8), vocab_size=1000, seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_more_prompts_than_tokens_are_possible():
    prompts = make_prompts(10, PromptShape(3), vocab_size=4, seed=0)
    assert len(prompts) == 10


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(0, 0), (4, 4), (4, 5), (4, -1)])
def test_impossible_shapes_are_refused(num_tokens, num_shared):
    with pytest.raises(ValueError, match="shared of"):
        PromptShape(num_tokens, num_shared)
