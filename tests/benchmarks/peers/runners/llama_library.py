"""llama.cpp's C interface, as far as the runners call it: a model, its context, batches and their
logits. Knows no workload.

Of parameters only those are set that stand first in their structure: the others have llama.cpp's
defaults, wherever a release keeps them.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.peers.runners.wire import Settings

BATCH = 2048
"""Rows of a call at most: llama.cpp's default."""
DEFAULTS = (512, BATCH, 512, 1)
"""Of the parameters that stand first: other ones mean that the structure is another."""
KERNELS = re.compile(r"libggml-cpu-(\w+)\.so")
Row = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are wanted."""


class ModelParameters(c.Structure):
    """`llama_model_params`, and room for what a release may add."""

    _fields_ = (("rest", c.c_uint64 * 64),)


class ContextParameters(c.Structure):
    """`llama_context_params`, and room for what a release may add."""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("rest", c.c_uint64 * 64),
    )


class ThreadpoolParameters(c.Structure):
    """`ggml_threadpool_params`, and room for what a release may add."""

    _fields_ = (("rest", c.c_uint64 * 128),)


class Batch(c.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.c_void_p),
    )


class LlamaModel:
    """A GGUF file, loaded with the kernels that llama.cpp chose for this processor, and one
    context."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings["libraries"])
        self._llama = _llama(folder)
        base = c.CDLL(str(folder / "libggml-base.so"))
        (ggml,) = map(str, folder.glob("libggml.*so"))
        c.CDLL(ggml).ggml_backend_load_all_from_path(str(folder).encode())
        maps = Path("/proc/self/maps").read_text()
        found = KERNELS.search(maps)
        if found is None:
            raise RuntimeError(f"llama.cpp loaded no kernels of {folder} on this processor")
        self.versions = {"llama.cpp": f"{settings['release']}, kernels {found[1]}"}
        self._llama.llama_backend_init()
        parameters = self._llama.llama_model_default_params()
        path = settings["model"].encode()
        self._model = self._llama.llama_model_load_from_file(path, parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp refuses {settings['model']}")
        self.weight_bytes: int = self._llama.llama_model_size(self._model)
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        self._num_tokens: int = self._llama.llama_vocab_n_tokens(vocabulary)
        self._context = self._context_of(settings["sequences"], settings["sequence_tokens"])
        self._memory = self._llama.llama_get_memory(self._context)
        self._use_threads(base, c.CDLL(str(folder / found[0])), settings["threads"])

    def decode(self, rows: Sequence[Row]) -> Any:
        """Computes rows; returns the logits of those that want some, float32 [wanted, vocabulary]:
        they last until the next call."""
        kinds = (np.int32, np.int32, np.int32, np.int8)
        columns = zip(*rows, strict=True)
        tokens, places, sequences, wanted = map(np.array, columns, kinds)
        ones = np.ones(len(rows), np.int32)
        pointers = sequences.ctypes.data + sequences.itemsize * np.arange(
            len(rows), dtype=np.uint64
        )
        arrays = (places, ones, pointers, wanted)
        batch = Batch(len(rows), tokens.ctypes.data, None, *(each.ctypes.data for each in arrays))
        status = self._llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(rows)} rows: status {status}")
        logits = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (int(wanted.sum()), self._num_tokens))

    def forget(self, sequence: int) -> None:
        """Frees the KV of a sequence."""
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _context_of(self, num_sequences: int, num_tokens: int) -> int:
        parameters = self._llama.llama_context_default_params()
        said = tuple(getattr(parameters, name) for name, _ in ContextParameters._fields_[:4])
        if said != DEFAULTS:
            raise RuntimeError(f"llama_context_params begins with {said}, expected {DEFAULTS}")
        parameters.n_ctx = num_sequences * num_tokens
        parameters.n_seq_max = num_sequences
        context = self._llama.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"no context for {num_sequences} sequences of {num_tokens} tokens")
        return int(context)

    def _use_threads(self, base: c.CDLL, kernels: c.CDLL, num_threads: int) -> None:
        """Keeps threads between calls, as llama.cpp's programs do."""
        base.ggml_threadpool_params_default.restype = ThreadpoolParameters
        kernels.ggml_threadpool_new.restype = c.c_void_p
        parameters = base.ggml_threadpool_params_default(num_threads)
        pool = c.c_void_p(kernels.ggml_threadpool_new(c.byref(parameters)))
        self._llama.llama_attach_threadpool(self._context, pool, pool)
        self._llama.llama_set_n_threads(self._context, num_threads, num_threads)


def _llama(folder: Path) -> Any:
    (path,) = folder.glob("libllama.*so")
    llama = c.CDLL(str(path))
    pointer = c.c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llama_model_default_params": (ModelParameters, ()),
        "llama_model_load_from_file": (pointer, (c.c_char_p, ModelParameters)),
        "llama_model_size": (c.c_uint64, (pointer,)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_vocab_n_tokens": (c.c_int32, (pointer,)),
        "llama_context_default_params": (ContextParameters, ()),
        "llama_init_from_model": (pointer, (pointer, ContextParameters)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_seq_rm": (c.c_bool, (pointer, c.c_int32, c.c_int32, c.c_int32)),
        "llama_attach_threadpool": (None, (pointer, pointer, pointer)),
        "llama_set_n_threads": (None, (pointer, c.c_int32, c.c_int32)),
        "llama_decode": (c.c_int32, (pointer, Batch)),
        "llama_get_logits": (c.POINTER(c.c_float), (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama
