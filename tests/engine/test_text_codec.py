import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from engine.chat_encoder import ChatTemplateError
from engine.text_codec import ModelFilesError, TextCodec


@pytest.fixture(scope="module")
def codec(model_dir):
    return TextCodec.from_directory(model_dir)


@pytest.fixture
def directory(model_dir, tmp_path):
    """A copy of the text files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(model_dir / name, tmp_path / name)
    return tmp_path


def change(file, **values):
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_the_default_model(codec):
    assert codec.vocab_size == 49152
    assert codec.context_window_tokens == 8192
    assert codec.eos_token_ids == {2}


def test_encoding_equals_transformers(codec, model_dir):
    reference = AutoTokenizer.from_pretrained(model_dir)
    for text in ("", " ", "The capital of France is", "a\r\nb", "👩‍👩‍👧‍👦", "नमस्ते", "1, 2, 3, 4, 5,", "x <|im_end|> y"):
        assert codec.encode(text) == reference.encode(text)


def test_control_tokens_in_a_text_prompt_are_control_tokens(codec):
    assert codec.encode("<|im_start|>user") == [1, 4093]


def test_a_conversation_equals_transformers(codec, model_dir):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    reference = AutoTokenizer.from_pretrained(model_dir)
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(messages) == ids


def test_detokenizers_are_independent(codec):
    first, second = codec.detokenizer(), codec.detokenizer()
    assert first.push([10813, 235]) == ""
    assert second.push([7042]) == " Paris"
    assert first.push([231]) == "👍"


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(2, None, {2}), ([0, 2], None, {0, 2}), (2, [0, 1], {0, 1}), (None, 0, {0})],
)
def test_end_tokens(directory, in_config, in_generation_config, expected):
    change(directory / "config.json", eos_token_id=in_config)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert TextCodec.from_directory(directory).eos_token_ids == expected


def test_text_config_of_a_multimodal_model(directory):
    (directory / "config.json").write_text(
        json.dumps({"text_config": {"vocab_size": 7, "max_position_embeddings": 9, "eos_token_id": 0}})
    )
    codec = TextCodec.from_directory(directory)
    assert (codec.vocab_size, codec.context_window_tokens, codec.eos_token_ids) == (7, 9, {0})


@pytest.mark.parametrize(
    "template", ["T", [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "T"}]]
)
def test_a_template_in_the_tokenizer_configuration(directory, template):
    (directory / "chat_template.jinja").unlink()
    change(directory / "tokenizer_config.json", chat_template=template)
    codec = TextCodec.from_directory(directory)
    assert codec.encode_chat([{"role": "user", "content": "Hi"}]) == codec.encode("T")


def test_special_tokens_of_the_configuration_reach_the_template(directory):
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    change(directory / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "<|im_end|>"})
    assert TextCodec.from_directory(directory).encode_chat([{"role": "user", "content": "Hi"}]) == [1, 2]


def test_a_model_without_a_template_takes_text_only(directory):
    (directory / "chat_template.jinja").unlink()
    codec = TextCodec.from_directory(directory)
    assert codec.encode("Hi")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "Hi"}])


def test_prompts_are_never_cut_or_padded(directory):
    change(
        directory / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<|im_end|>",
        },
    )
    codec = TextCodec.from_directory(directory)
    assert len(codec.encode(" Hello" * 20)) == 20


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ModelFilesError, match=name):
        TextCodec.from_directory(directory)


def test_a_missing_value_is_named(directory):
    change(directory / "config.json", max_position_embeddings=None)
    with pytest.raises(ModelFilesError, match="max_position_embeddings"):
        TextCodec.from_directory(directory)


def test_it_needs_no_torch(model_dir):
    program = (
        "import sys, pathlib; from engine.text_codec import TextCodec\n"
        "codec = TextCodec.from_directory(pathlib.Path(sys.argv[1]))\n"
        "assert codec.encode_chat([{'role': 'user', 'content': 'Hi'}]) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(model_dir)], check=True, timeout=60)
