"""Token ids to text, piece by piece: never half a character, and together exactly the text of the whole."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most 4 bytes and a token at least one: how bytes after these tokens are read
# depends on nothing before them.
_NUM_CONTEXT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """What a tokenizer's decoder makes of single ids; made once per tokenizer.

    `byte_ids` are tokens such as <0x0A>, of which a decoder with byte fallback reads a whole run at once: if
    the run is not valid UTF-8, each of its bytes becomes U+FFFD.
    """

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    byte_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Reads the rules off the tokenizer."""
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        candidates = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        byte_ids = [i for i in candidates if i is not None]
        # In a byte-level vocabulary such a token is ordinary text of six characters.
        has_byte_fallback = all(len(tokenizer.decode([i])) <= 1 for i in byte_ids)
        return cls(tokenizer, special_ids, frozenset(byte_ids) if has_byte_fallback else frozenset())


class Detokenizer:
    """One answer's text. The pieces joined equal `decode` of all ids, however the ids are split into pushes.

    Special tokens are hidden. The end of the text is kept back while a later token may still change it: an
    incomplete character, or an open run of byte-fallback tokens. What is incomplete at the end becomes U+FFFD,
    as `decode` has it. Works for decoders that put tokens together from left to right: byte-level, and
    SentencePiece-like ones with byte fallback. Time is linear in the number of ids.

    tokenizers.decoders.DecodeStream is not used: it keeps back everything while the text ends in U+FFFD, so
    a run of invalid bytes never comes out, in quadratic time, and it has no end.
    """

    def __init__(self, rules: DecodingRules) -> None:
        self._rules = rules
        self._window: list[int] = []  # context, then the ids whose text is not all sent
        self._num_sent = 0  # characters of the window's text
        self._byte_run: list[int] = []  # open run of byte-fallback tokens, after the window

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that has become certain, perhaps none."""
        visible = [i for i in token_ids if self._is_visible(i)]
        num_closed = len(visible)
        while num_closed and visible[num_closed - 1] in self._rules.byte_ids:
            num_closed -= 1
        if num_closed == 0:
            self._byte_run += visible
            return ""
        self._window += self._byte_run + visible[:num_closed]
        self._byte_run = visible[num_closed:]
        return self._certain_text()

    def finish(self) -> str:
        """Returns the text kept back. Nothing may be pushed afterwards."""
        return self._decode(self._window + self._byte_run)[self._num_sent :]

    def _certain_text(self) -> str:
        # At most the last U+FFFD can stand for a character that is still incomplete.
        certain = self._decode(self._window).removesuffix(_REPLACEMENT)
        piece = certain[self._num_sent :]
        self._window = self._window[-_NUM_CONTEXT_TOKENS:]
        self._num_sent = len(self._decode(self._window).removesuffix(_REPLACEMENT))
        return piece

    def _is_visible(self, token_id: int) -> bool:
        # Ids without a token, such as those that pad a vocabulary, have no text.
        return token_id not in self._rules.special_ids and bool(self._rules.tokenizer.id_to_token(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._rules.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
