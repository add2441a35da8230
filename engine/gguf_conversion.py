"""Turns a GGUF file into a plain float32 model directory; `engine.model_store` runs it as a process."""

import copy
import sys
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def convert_gguf(source: Path, destination: Path) -> None:
    """Writes config.json, safetensors, generation_config.json and the tokenizer of `source` to `destination`.

    Weights are de-quantized to float32: exact for every GGUF quantization, whatever dtype they are run in
    later. Raises what transformers and gguf raise for a file they cannot read.
    """
    origin = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    _report("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**origin)
    _report("de-quantizing the weights")
    quantized = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
    _report("writing safetensors")
    plain = _without_quantization(quantized)
    plain.generation_config = _generation_config(plain, tokenizer)
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    # A model loaded from GGUF refuses save_pretrained because its config still names the quantization,
    # although its weights are plain by then. So they move to a model built from a config without it.
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    configured = model.config.eos_token_id
    eos_token_ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(eos_token_ids - {None}),
        pad_token_id=tokenizer.pad_token_id,
    )


def _report(progress: str) -> None:
    print(progress, flush=True)  # noqa: T201 - the parent process reads progress from standard output


def main() -> None:
    """Command line: SOURCE.gguf DESTINATION_DIRECTORY."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source, destination = map(Path, sys.argv[1:])
    convert_gguf(source, destination)


if __name__ == "__main__":
    main()
