"""Dense modules of sentence-transformers: products of a pooled vector, each in a separate folder.
Their headers are read with the model, their weights by its last stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from services.stage.model.refusal import refuse
from services.stage.model.weights import COPY_AGAIN, DENSE, ONE_FILE, check_file
from shardline.contract.job import MAX_DIMENSIONS

PICKLE = "pytorch_model.bin"
WEIGHT = "linear.weight"
BIAS = "linear.bias"
FLOATS = ("F64", "F32", "F16", "BF16")
SENTENCE = "sentence_embedding"
"""The name of a pooled vector among what modules pass on."""
NONLINEARITIES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "Identity": nn.Identity,
        "Tanh": nn.Tanh,
        "ReLU": nn.ReLU,
        "GELU": nn.GELU,
        "SiLU": nn.SiLU,
        "Sigmoid": nn.Sigmoid,
    }
)
"""By their names in torch.nn."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """One module: a linear layer and what its outputs go through."""

    file: Path
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str

    @property
    def num_bytes(self) -> int:
        """Returns what its weights take in memory."""
        return (self.num_inputs + self.has_bias) * self.num_outputs * FLOAT32_BYTES

    def load(self, device: torch.device) -> nn.Module:
        """Returns it with its weights in float32, of which the vectors are: it takes [N] and
        returns [M]. Raises Invalid if the file cannot be read."""
        try:
            stored = load_file(self.file)
        except (SafetensorError, OSError) as error:
            refuse(f"{self.file} cannot be loaded: {error}", COPY_AGAIN, error)
        names = (WEIGHT, BIAS) if self.has_bias else (WEIGHT,)
        sizes = (self.num_inputs, self.num_outputs)
        linear = nn.Linear(*sizes, bias=self.has_bias, device="meta").requires_grad_(False)
        # A copy: the loader's tensors may lie in the file.
        weights = {
            name.rpartition(".")[2]: stored[name].to(device, torch.float32, copy=True)
            for name in names
        }
        linear.load_state_dict(weights, assign=True)
        return nn.Sequential(linear, NONLINEARITIES[self.activation]())


def read_dense(folder: Path, settings: Mapping[str, Any], num_inputs: int) -> DenseLayer:
    """Reads a module that takes vectors of `num_inputs`, by its config.json and the header of its
    weights. Raises Invalid for one that no stage can run."""
    if not folder.match(DENSE):
        refuse(f"{folder} is a Dense module", "Name its folder N_Dense, in modules.json too")
    others = {
        name: settings[name]
        for name in ("module_input_name", "module_output_name")
        if settings.get(name) not in (None, SENTENCE)
    }
    if others:
        refuse(f"{folder} is no product of the pooled vector ({others})")
    sizes = (_size(folder, settings, "in_features"), _size(folder, settings, "out_features"))
    if sizes[0] != num_inputs:
        refuse(f"{folder} takes {sizes[0]} numbers, and {num_inputs} come", "Correct the config")
    has_bias = settings.get("bias", True)
    if type(has_bias) is not bool:
        refuse(f"{folder} has bias {has_bias!r}", "Write true or false")
    dense = DenseLayer(
        file=folder / ONE_FILE,
        num_inputs=num_inputs,
        num_outputs=sizes[1],
        has_bias=has_bias,
        activation=_activation(folder, settings),
    )
    _check_weights(dense)
    return dense


def _size(folder: Path, settings: Mapping[str, Any], name: str) -> int:
    found = settings.get(name)
    if type(found) is not int or not 1 <= found <= MAX_DIMENSIONS:
        problem = f"{folder} has {name} {found!r}, not a number from 1 to {MAX_DIMENSIONS:,}"
        refuse(problem, COPY_AGAIN)
    return found


def _activation(folder: Path, settings: Mapping[str, Any]) -> str:
    named = str(settings.get("activation_function") or "torch.nn.Tanh")
    package, _, name = named.rpartition(".")
    if name not in NONLINEARITIES or not f"{package}.".startswith("torch.nn."):
        refuse(f"{folder} has the activation {named}; {', '.join(NONLINEARITIES)} can be served")
    return name


def _check_weights(dense: DenseLayer) -> None:
    folder = dense.file.parent
    if not dense.file.is_file():
        found = f"only {PICKLE}" if (folder / PICKLE).is_file() else "no weights"
        remedy = "Save the model again with sentence-transformers' save_pretrained (safetensors)"
        refuse(f"{folder} has {found}, no {ONE_FILE}", remedy)
    tensors = check_file(dense.file).tensors
    expected = {WEIGHT: [dense.num_outputs, dense.num_inputs]}
    if dense.has_bias:
        expected[BIAS] = [dense.num_outputs]
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor["shape"] != shape or tensor["dtype"] not in FLOATS:
            shown = "none" if tensor is None else f"{tensor['shape']} of {tensor['dtype']}"
            refuse(f"{dense.file} has {name} {shown}, not {shape} of floats", COPY_AGAIN)
