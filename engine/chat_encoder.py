"""Conversations to token ids with a model's chat template; control tokens in their text stay text."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

# Private use: to a template these are characters like any other.
_MARKS = range(0xF0000, 0xFFFFE)


class ChatTemplateError(ValueError):
    """A conversation cannot be turned into a prompt; the message says why."""


class ChatEncoder:
    """One chat template with its tokenizer.

    `special_tokens` are the values that templates may use by name, such as bos_token.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._control_token_ids = _control_token_ids(tokenizer, template)
        longest_first = sorted(self._control_token_ids, key=len, reverse=True)
        self._control_tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the conversation, followed by the opening of the assistant's turn.

        Equal to `apply_chat_template(messages, add_generation_prompt=True)` of transformers, except that a
        control token written in a message is encoded as the characters it consists of, as its
        `sanitize_control_tokens` does. Raises ChatTemplateError.
        """
        if not messages:
            raise ChatTemplateError("the conversation has no messages: give at least one")
        opening, closing = _unused_marks(chain.from_iterable(message.values() for message in messages))
        marked = [
            {key: self._control_tokens.sub(rf"{opening}\g<0>{closing}", text) for key, text in message.items()}
            for message in messages
        ]
        # A template may take a marked text apart; a mark that is left alone still separates.
        splitter = f"{opening}({self._control_tokens.pattern}){closing}|[{opening}{closing}]"
        pieces = re.split(splitter, self._render(marked))  # text, control token or None, text, ...
        ids = self._encode_piece(pieces[0])
        for i, piece in enumerate(pieces[1:], start=1):
            if piece and i % 2:
                ids += self._encode_control_text(piece)
            elif piece:
                ids += _encode_in_the_middle(self._encode_piece, piece)
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _encode_control_text(self, piece: str) -> list[int]:
        ids = _encode_in_the_middle(self._encode_plain, piece)
        if self._control_token_ids[piece] in ids:
            raise ChatTemplateError(f"{piece!r} cannot be written as text with this tokenizer: leave it out")
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """The tokenizer's stages one by one, without the one that looks for added tokens."""
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        words = [text]
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._tokenizer.model.tokenize(word)]

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            rendered, _ = render_jinja_template(
                [list(messages)],
                chat_template=self._template,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the model's chat template rejects the conversation: {error}") from error
        text: str = rendered[0]
        return text


def _control_token_ids(tokenizer: Tokenizer, template: str) -> dict[str, int]:
    """Tokens that text must not be able to forge: special ones, and added ones that the template writes.

    Other added tokens are words. So is white space, which templates write as text.
    """
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or (token.content in template and not token.content.isspace())
    }


def _unused_marks(texts: Iterable[str]) -> tuple[str, str]:
    used = set(chain.from_iterable(texts))
    marks = list(islice((chr(mark) for mark in _MARKS if chr(mark) not in used), 2))
    if len(marks) < 2:
        raise ChatTemplateError("the conversation uses every private-use character of plane 15: leave some out")
    return marks[0], marks[1]


def _encode_in_the_middle(encode: Callable[[str], list[int]], piece: str) -> list[int]:
    # SentencePiece puts a space before the first word it sees; behind a line break the piece is not first.
    newline_ids, ids = encode("\n"), encode("\n" + piece)
    return ids[len(newline_ids) :] if ids[: len(newline_ids)] == newline_ids else encode(piece)
