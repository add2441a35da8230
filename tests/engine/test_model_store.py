"""Models are found, converted once, and identified by their content."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import save_file

from engine import model_store
from engine.model_store import ModelUnavailableError, default_model_file, model_fingerprint, resolve_model


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def converted(cache_dir: Path) -> tuple[Path, list[str]]:
    progress: list[str] = []
    return resolve_model(None, cache_dir=cache_dir, on_progress=progress.append), progress


def model_directory(path: Path, *, weight: float = 1.0, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"weight": np.full((4, 4), weight, np.float32)}, path / "model.safetensors")
    return path


def test_converted_weights_are_the_dequantized_ones(converted: tuple[Path, list[str]]) -> None:
    quantized = {tensor.name: tensor for tensor in gguf.GGUFReader(default_model_file()).tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }
    with safe_open(converted[0] / "model.safetensors", "np") as weights:
        for name, gguf_name in names.items():
            tensor = quantized[gguf_name]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weights.get_tensor(name), expected)


def test_converted_directory_is_complete(converted: tuple[Path, list[str]]) -> None:
    directory, progress = converted
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2]
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("Paris, 👍").ids) == "Paris, 👍"
    assert "im_start" in (directory / "chat_template.jinja").read_text()
    assert any("de-quantizing" in line for line in progress)


def test_second_start_converts_nothing(converted: tuple[Path, list[str]], cache_dir: Path) -> None:
    progress: list[str] = []
    assert resolve_model(default_model_file(), cache_dir=cache_dir, on_progress=progress.append) == converted[0]
    assert progress == []
    assert list(cache_dir.iterdir()) == [converted[0]], "no temporary directories are left"


def test_the_process_that_converts_second_takes_the_first_result(tmp_path: Path) -> None:
    first = model_directory(tmp_path / "first")
    model_store._move_into_place(model_directory(tmp_path / "second", weight=2.0), first)
    assert model_fingerprint(first) == model_fingerprint(model_directory(tmp_path / "same"))


def test_model_directory_is_used_as_it_is(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    assert resolve_model(directory) == directory


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_directory_is_refused(tmp_path: Path, missing: str) -> None:
    directory = model_directory(tmp_path / "model")
    (directory / missing).unlink()
    with pytest.raises(ModelUnavailableError, match=missing.replace("model.", r"\*.")):
        resolve_model(directory)


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"no model at .*/absent"):
        resolve_model(tmp_path / "absent")


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailableError, match="neither"):
        resolve_model(file)


def test_file_that_is_not_gguf_inside_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "page.gguf"
    file.write_bytes(b"<html>")
    with pytest.raises(ModelUnavailableError, match="does not begin with 'GGUF'"):
        resolve_model(file, cache_dir=tmp_path / "cache")


def test_cut_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file, cache = tmp_path / "cut.gguf", tmp_path / "cache"
    with default_model_file().open("rb") as whole:
        file.write_bytes(whole.read(4096))
    with pytest.raises(ModelUnavailableError, match=r"cut\.gguf cannot be converted: \S+"):
        resolve_model(file, cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_fingerprint_follows_content_and_not_the_tools(tmp_path: Path) -> None:
    original = model_fingerprint(model_directory(tmp_path / "a", hidden_size=8, transformers_version="5.0"))
    other_tool = model_fingerprint(model_directory(tmp_path / "b", hidden_size=8, transformers_version="5.1"))
    other_weight = model_fingerprint(model_directory(tmp_path / "c", hidden_size=8, weight=1.5))
    other_config = model_fingerprint(model_directory(tmp_path / "d", hidden_size=16))
    assert original == other_tool
    assert len({original, other_weight, other_config}) == 3
