"""An answer's text up to its first stop string, wherever the borders of tokens fall. Pure."""

from collections.abc import Iterable, Sequence

from engine.detokenizer import Detokenizer


class StopScanner:
    """Lets text through until a stop string is complete; keeps back only what may still become one.

    The string that is complete first counts, of several that end at the same character the longest. So what is
    found does not depend on the pieces that the text comes in.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """`stops`: none of them empty. `includes_stop`: the string that was found is part of the text."""
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._kept = ""

    def push(self, text: str) -> str:
        """Takes more text; returns what has become certain. Nothing may be pushed after a match."""
        text = self._kept + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            return text[: end if self._includes_stop else start]
        num_certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """Returns the text that was kept back: no stop string came of it."""
        return self._kept


class AnswerText:
    """One answer's tokens to its text, and where a stop string ends it."""

    def __init__(self, detokenizer: Detokenizer, scanner: StopScanner, stop_token_ids: frozenset[int]) -> None:
        """Tokens in `stop_token_ids` have no text."""
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_token_ids = stop_token_ids

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._scanner.matched

    def push(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Takes new tokens; returns those that belong to the answer and the text that has become certain.

        The token that completes a stop string is the last one that belongs to it.
        """
        pieces: list[str] = []
        for i, token_id in enumerate(token_ids):
            pieces.append(self._scanner.push(self._detokenizer.push(self._visible(token_id))))
            if self.matched is not None:
                return list(token_ids[: i + 1]), "".join(pieces)
        return list(token_ids), "".join(pieces)

    def finish(self) -> str:
        """Returns the text kept back, once the last token is there; without a match before, it may bring one."""
        if self.matched is not None:
            return ""
        text = self._scanner.push(self._detokenizer.finish())
        return text if self.matched is not None else text + self._scanner.finish()

    def _visible(self, token_id: int) -> Iterable[int]:
        return () if token_id in self._stop_token_ids else (token_id,)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that a stop string, not yet complete, begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
