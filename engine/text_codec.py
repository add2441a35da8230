"""Text and conversations to token ids and back, from the files of a model directory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from engine.chat_encoder import ChatEncoder, ChatTemplateError
from engine.detokenizer import DecodingRules, Detokenizer


class ModelFilesError(ValueError):
    """A model directory lacks something; the message names the file."""


class TextCodec:
    """The text side of one model; safe to share.

    `vocab_size`: token ids are in [0, vocab_size), as config.json has it, not the tokenizer, which may know
    fewer. `context_window_tokens`: most tokens of prompt and answer. `eos_token_ids`: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatEncoder | None, config: Mapping[str, Any]) -> None:
        """`config`: config.json, with what generation_config.json says instead."""
        tokenizer.no_truncation()  # a prompt is never cut or filled up, whatever tokenizer.json says
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat = chat
        self._decoding_rules = DecodingRules.of(tokenizer)
        self.vocab_size: int = _value(config, "vocab_size")
        self.context_window_tokens: int = _value(config, "max_position_embeddings")
        self.eos_token_ids: frozenset[int] = _ids(_value(config, "eos_token_id"))

    @classmethod
    def from_directory(cls, model_dir: Path) -> Self:
        """Reads tokenizer.json, config.json and, where they exist, generation_config.json,
        tokenizer_config.json and chat_template.jinja. Raises ModelFilesError.
        """
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.exists():
            raise ModelFilesError(f"{model_dir} has no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        config = _read(model_dir / "config.json")
        if not config:
            raise ModelFilesError(f"{model_dir} has no config.json")
        # As in transformers, the generation configuration has the last word on the end tokens.
        eos = _read(model_dir / "generation_config.json").get("eos_token_id")
        if eos is not None:
            config["eos_token_id"] = eos
        return cls(tokenizer, _chat_encoder(model_dir, tokenizer), config)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is: control tokens written in it are control tokens.

        A start token is added if tokenizer.json says so.
        """
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, see ChatEncoder.encode. Raises ChatTemplateError."""
        if self._chat is None:
            raise ChatTemplateError("the model has no chat template: send text or token ids")
        return self._chat.encode(messages)

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one answer."""
        return Detokenizer(self._decoding_rules)


def _chat_encoder(model_dir: Path, tokenizer: Tokenizer) -> ChatEncoder | None:
    config = _read(model_dir / "tokenizer_config.json")
    template_file = model_dir / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(template, list):  # older files hold several, by name
        template = next((named["template"] for named in template if named["name"] == "default"), None)
    if not template:
        return None
    # Each is a text, or what an AddedToken was saved as.
    special_tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    return ChatEncoder(tokenizer, template, special_tokens)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def _value(config: Mapping[str, Any], key: str) -> Any:
    """A value of the model, which in multimodal configurations stands under text_config."""
    value = config.get(key, config.get("text_config", {}).get(key))
    if value is None:
        raise ModelFilesError(f"config.json has no {key}")
    return value


def _ids(value: int | Sequence[int]) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value)
