"""Builds and loads the CPU kernels in cpu_kernels.c with the machine's own C compiler, if it has one."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpu_kernels.c"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi")
BUILD_TIMEOUT_S = 120

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class AttentionArguments(ctypes.Structure):
    """Arguments of `baton_attention`; see the C source for shapes and strides."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "layer_base", "tables", "contexts", "scores", "tokens", "out")),
        *((name, _INT) for name in ("rows", "heads", "kv_heads", "head_dim", "block_size", "block_stride")),
        *((name, _INT) for name in ("table_width", "q_token_stride", "q_head_stride")),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


class KvStoreArguments(ctypes.Structure):
    """Arguments of `baton_kv_store`; see the C source for shapes and strides."""

    _fields_ = (
        *((name, _POINTER) for name in ("k", "v", "layer_base", "slots")),
        *((name, _INT) for name in ("tokens", "kv_heads", "head_dim", "block_size", "block_stride")),
        *((name, _INT) for name in ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")),
        ("item_bytes", _INT),
    )


class NativeKernels:
    """The loaded library. Calls release the interpreter lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pack_bf16 = _function(library, "baton_pack_bf16", _POINTER, _POINTER, _INT, _INT)
        self.pack_f32 = _function(library, "baton_pack_f32", _POINTER, _POINTER, _INT, _INT)
        pointers, sizes = (_POINTER,) * 4, (_INT,) * 3
        self.linear_bf16 = _function(library, "baton_linear_bf16", *pointers, _POINTER, *sizes)
        self.linear_f32 = _function(library, "baton_linear_f32", *pointers, *sizes)
        self.attention = _function(library, "baton_attention", ctypes.POINTER(AttentionArguments))
        self.kv_store = _function(library, "baton_kv_store", ctypes.POINTER(KvStoreArguments))


def load(cache_dir: Path) -> NativeKernels | None:
    """Loads the kernels, building them first if `cache_dir` has none for this source, compiler and processor.

    Returns None, with a logged reason, where there is no C compiler or it fails: the engine then computes with
    torch alone, more slowly.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.warning("no C compiler found (cc, gcc, clang): computing with torch alone, more slowly")
        return None
    try:
        target = cache_dir / f"cpu_kernels-{_build_key(compiler)}.so"
        if not target.exists():
            _build(compiler, target)
        return NativeKernels(ctypes.CDLL(str(target)))
    except (OSError, subprocess.SubprocessError) as error:
        # What the compiler said, if it ran at all.
        details = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        logger.warning(
            "the CPU kernels could not be built or loaded, computing with torch alone: %s\n%s", error, details
        )
        return None


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        built = Path(work) / target.name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        os.replace(built, target)  # two processes may build at once: the last one wins, both are good


def _build_key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    key = hashlib.sha256(SOURCE.read_bytes() + version.stdout + " ".join(FLAGS).encode())
    key.update(f"{platform.machine()} {_processor_features()}".encode())
    return key.hexdigest()[:16]


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _function(library: ctypes.CDLL, name: str, *argtypes: type) -> "ctypes._NamedFuncPointer":
    function = library[name]
    function.argtypes = argtypes
    function.restype = None
    return function
