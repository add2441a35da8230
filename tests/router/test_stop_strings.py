from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text_codec import TextCodec
from router.stop_strings import AnswerText, StopScanner

TEXTS = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)
CUTS = st.sets(st.integers(1, 39))
NONE = frozenset()


@pytest.fixture(scope="module")
def codec(model_dir):
    return TextCodec.from_directory(model_dir)


def first_stop(text, stops):
    """By the definition: the shortest beginning of the text that ends with a stop string, and the longest such."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def expected(text, stops, *, includes_stop=False):
    found = first_stop(text, stops)
    if found is None:
        return text, None
    end, stop = found
    return text[: end if includes_stop else end - len(stop)], stop


def scanned(text, stops, cuts, **options):
    """The pieces that come out if the text goes in cut at these places."""
    scanner, out = StopScanner(stops, **options), []
    borders = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    for start, end in pairwise(borders):
        out.append(scanner.push(text[start:end]))
        if scanner.matched is not None:
            return out, scanner.matched
    return [*out, scanner.finish()], None


@given(TEXTS, STOPS, CUTS, st.booleans())
def test_the_text_ends_at_the_first_complete_stop_string_however_it_is_cut(text, stops, cuts, includes_stop):
    out, matched = scanned(text, stops, cuts, includes_stop=includes_stop)
    assert ("".join(out), matched) == expected(text, stops, includes_stop=includes_stop)


@given(TEXTS, STOPS)
def test_no_more_is_kept_back_than_may_become_a_stop_string(text, stops):
    scanner, out = StopScanner(stops), ""
    for i, character in enumerate(text):
        out += scanner.push(character)
        if scanner.matched is not None:
            return
        kept = text[len(out) : i + 1]
        assert not kept or any(stop.startswith(kept) for stop in stops)


def answered(codec, token_ids, stops, step, stop_token_ids=NONE):
    """Token ids that belong to the answer, and its pieces, if it comes in deltas of so many tokens."""
    answer, own_ids, pieces = AnswerText(codec.detokenizer(), StopScanner(stops), stop_token_ids), [], []
    for i in range(0, len(token_ids), step):
        ids, piece = answer.push(token_ids[i : i + step])
        own_ids += ids
        pieces.append(piece)
        if answer.matched is not None:
            break
    return own_ids, [*pieces, answer.finish()], answer.matched


@given(token_ids=st.lists(st.integers(3, 49_151), min_size=1, max_size=30), data=st.data(), step=st.integers(1, 7))
def test_pieces_of_any_tokens_join_to_the_text_before_the_stop_string(codec, token_ids, data, step):
    detokenizer = codec.detokenizer()
    whole = detokenizer.push(token_ids) + detokenizer.finish()
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stops = [s for s in [whole[start : start + data.draw(st.integers(1, 6))]] if s]
    own_ids, pieces, matched = answered(codec, token_ids, stops, step)
    assert ("".join(pieces), matched) == expected(whole, stops)
    assert own_ids == token_ids[: len(own_ids)]
    by_one = answered(codec, token_ids, stops, 1)
    assert (own_ids, "".join(pieces), matched) == (by_one[0], "".join(by_one[1]), by_one[2])
    for piece in pieces:
        piece.encode()  # raises for half a character


def test_a_stop_token_has_no_text_and_so_completes_no_stop_string(codec):
    token_ids = codec.encode("one two")
    own_ids, pieces, matched = answered(codec, token_ids, ["one two"], 1, frozenset(token_ids[-1:]))
    assert (own_ids, "".join(pieces), matched) == (token_ids, "one", None)
