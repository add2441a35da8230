"""The same model as transformers runs it by itself, without any of our code."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.verify.rounding import ModelDepth
from bench.verify.sorted_row import Logits
from worker.host import DTYPES


class ReferenceTokenizer:
    """The model's tokenizer and chat template by transformers."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is, with a start token if the tokenizer adds one."""
        ids: list[int] = self._tokenizer(text).input_ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Token ids of a conversation with the opening of the answer; None if the model has no chat template."""
        if not self._tokenizer.chat_template:
            return None
        ids: list[int] = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Reference:
    """The model in one type, on the CPU."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        """Loads the weights: seconds."""
        self.dtype = dtype
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype], local_files_only=True)
        self._model.eval()
        config = self._model.config
        self.depth = ModelDepth(config.num_hidden_layers, config.hidden_size)

    @torch.inference_mode()
    def rows(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] that decide each token of an answer, given the prompt and the answer's tokens before it.

        Computed in one forward pass (teacher forcing); one row in double precision at a time.
        """
        inputs = torch.tensor([[*prompt, *answer[:-1]]])
        logits = self._model(inputs, use_cache=False, logits_to_keep=len(answer)).logits[0]
        for row in logits:
            yield row.double().numpy()
