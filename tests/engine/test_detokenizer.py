import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from engine.detokenizer import DecodingRules, Detokenizer

VOCAB_SIZE = 49152
STEPS = [1, 2, 3, 7]
# Four people held together by zero-width joiners, and a flag.
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f1eb\U0001f1f7"
TEXTS = ["  two  spaces ", " .", "a\r\nb", "你好\uff0c世界 ab", FAMILY, "नमस्ते", "\u0000x", "\ufffd", "a\ufffdb"]


def pieces(rules, token_ids, step):
    detokenizer = Detokenizer(rules)
    pushed = [detokenizer.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    return [*pushed, detokenizer.finish()]


def whole(rules, token_ids):
    return rules.tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def rules(model_dir):
    return DecodingRules.of(Tokenizer.from_file(str(model_dir / "tokenizer.json")))


@pytest.fixture(scope="module")
def fragment_ids(rules):
    """Tokens whose bytes are not whole characters by themselves."""
    return [i for i in range(VOCAB_SIZE) if "\ufffd" in rules.tokenizer.decode([i])]


@pytest.mark.parametrize("step", STEPS)
def test_pieces_of_random_ids_are_the_whole(rules, step):
    rng = random.Random(3)
    for _ in range(1000):
        token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 200))]
        assert "".join(pieces(rules, token_ids, step)) == whole(rules, token_ids)


@pytest.mark.parametrize("step", STEPS)
def test_pieces_of_broken_bytes_are_the_whole(rules, fragment_ids, step):
    rng = random.Random(4)
    choices = [*fragment_ids, *range(17), rules.tokenizer.token_to_id("A")]
    for _ in range(1000):
        token_ids = rng.choices(choices, k=rng.randint(1, 30))
        assert "".join(pieces(rules, token_ids, step)) == whole(rules, token_ids)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_are_the_text_of_its_ids(rules, text, step):
    token_ids = rules.tokenizer.encode(text).ids
    assert "".join(pieces(rules, token_ids, step)) == whole(rules, token_ids)


def test_half_a_character_is_kept_back(rules):
    """👍 and 🔥 are three tokens each."""
    assert pieces(rules, [10813, 235, 231, 10813, 238, 115], 1) == ["", "", "👍", "", "", "🔥", ""]


def test_no_piece_of_valid_text_holds_a_replacement(rules):
    token_ids = rules.tokenizer.encode(FAMILY + " नमस्ते 你好 é").ids
    assert "\ufffd" not in "".join(pieces(rules, token_ids, 1))
    assert all("\ufffd" not in piece for piece in pieces(rules, token_ids, 1))


@pytest.mark.parametrize(("token_ids", "text"), [([10813], "\ufffd"), ([10813, 235], "\ufffd")])
def test_a_character_cut_at_the_end_is_one_replacement(rules, token_ids, text):
    assert pieces(rules, token_ids, 1)[:-1] == [""] * len(token_ids)
    assert pieces(rules, token_ids, 1)[-1] == text


def test_the_first_piece_keeps_its_space(rules):
    assert pieces(rules, [7042, 30], 1) == [" Paris", ".", ""]


def test_special_tokens_and_ids_without_a_token_have_no_text(rules):
    assert pieces(rules, [1, 7042, 2, 60000], 1) == ["", " Paris", "", "", ""]


def test_what_is_certain_is_not_kept_back(rules, fragment_ids):
    """A run of invalid bytes comes out as it goes, all but the last."""
    lone_continuation = next(i for i in fragment_ids if rules.tokenizer.decode([i] * 3) == "\ufffd" * 3)
    assert pieces(rules, [lone_continuation] * 4, 1) == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


def test_time_is_linear_whatever_the_bytes(rules, fragment_ids):
    def seconds(num_tokens):
        started = time.perf_counter()
        pieces(rules, fragment_ids[-1:] * num_tokens, 1)
        return time.perf_counter() - started

    seconds(100)
    assert min(seconds(8000) for _ in range(2)) < 24 * min(seconds(1000) for _ in range(3))


def byte_fallback_rules():
    """A SentencePiece-like tokenizer: words with ▁ for a space, and all bytes as tokens."""
    tokens = ["<unk>", "▁", "▁a", "b", "é", "▁▁", "<0xZZ>", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return DecodingRules.of(tokenizer)


BYTE_FALLBACK = byte_fallback_rules()
utf8_ids = st.text(min_size=1, max_size=3).map(lambda text: [8 + byte for byte in text.encode()])
run_or_word = st.one_of(st.integers(0, 263).map(lambda i: [i]), st.integers(1, 7).map(lambda i: [i]), utf8_ids)


@given(st.lists(run_or_word, max_size=12), st.sampled_from(STEPS))
def test_pieces_are_the_whole_with_byte_fallback(runs, step):
    token_ids = [i for run in runs for i in run]
    assert "".join(pieces(BYTE_FALLBACK, token_ids, step)) == whole(BYTE_FALLBACK, token_ids)


def test_text_before_an_open_run_of_bytes_is_not_kept_back():
    detokenizer = Detokenizer(BYTE_FALLBACK)
    assert detokenizer.push([2, 3, 8 + 0xC3]) == "ab"
    assert detokenizer.push([8 + 0xA9]) == ""
    assert detokenizer.push([2]) == "é a"
    assert detokenizer.finish() == ""
