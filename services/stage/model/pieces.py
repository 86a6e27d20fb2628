"""The pieces of a decoder: what runs before its layers, the layers, what runs after them; and what
replaces a piece that another stage computes.

Letters of shapes: T packed rows, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.model.miniature import build_miniature, miniature_config
from services.stage.model.refusal import refuse
from services.stage.model.text_part import language_model, text_config
from services.stage.products.module_failures import FAILURES, first_line
from shardline.contract.fleet.joined_layers import joined_layers

NUM_TOKENS = 3


class PassThrough(nn.Module):
    """Replaces a piece that another stage computes: returns its first input of numbers."""

    def __init__(self, num_outputs: int | None = None) -> None:
        """It returns a tuple of `num_outputs`, if given, all but the first None."""
        super().__init__()
        self._num_outputs = num_outputs

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Returns the first tensor of a float dtype that it is given, [...], unchanged."""
        first = next(
            x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()
        )
        if self._num_outputs is None:
            return first
        return (first, *(None,) * (self._num_outputs - 1))


class NoEmbedding(nn.Module):
    """Replaces an embedding, of positions for example, if another stage has added its rows."""

    def forward(self, ids: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """Returns a zero, [], of the dtype of `ids`, int64 [...]: it changes nothing that it is
        added to."""
        return ids.new_zeros(())


def stub_of_layer(layer: nn.Module, num_outputs: int | None) -> nn.Module:
    """Returns what replaces a layer that another stage computes, with the words by which a model
    may ask its layers of what type they are, and the buffers that no checkpoint has: a model may
    compute those of all its layers at once."""
    stub = PassThrough(num_outputs)
    for name, value in vars(layer).items():
        if isinstance(value, str):
            setattr(stub, name, value)
    stored = layer.state_dict().keys()
    for path, buffer in layer.named_buffers():
        if path not in stored:
            _add_buffer(stub, path, buffer)
    return stub


def _add_buffer(module: nn.Module, path: str, buffer: Tensor) -> None:
    *parents, name = path.split(".")
    for each in parents:
        if not hasattr(module, each):
            module.add_module(each, nn.Module())
        module = module.get_submodule(each)
    module.register_buffer(name, buffer, persistent=False)


def stub_of(piece: nn.Module) -> nn.Module:
    """Returns what replaces a piece that another stage computes."""
    return NoEmbedding() if isinstance(piece, nn.Embedding) else PassThrough()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Names of modules inside the base model, such as `norm` or `decoder.layers`. What no name
    holds stays on every stage, such as a rotary embedding, which all layers need."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    num_outputs: int | None = None
    """Of a layer that returns a tuple, hidden states first; None: it returns these alone."""

    @classmethod
    def planned(cls, model: Any) -> Pieces:
        """Reads the names from transformers' pipeline plan. Raises Invalid if plan and model do not
        agree."""
        config = text_config(model.config)
        children = dict(language_model(model).named_children())
        plan = [name for name in config.base_model_pp_plan if name in children]
        lists = [name for name in plan if _are_layers(children[name], config)]
        unplanned = sorted(n for n, m in children.items() if n not in plan and _has_weights(m))
        joined = joined_layers(config.to_dict())
        is_whole = joined is not None and joined.layers.start == 0
        if len(lists) != 1 or (unplanned and not is_whole):
            what = (
                f"parts outside it ({', '.join(unplanned)})"
                if unplanned
                else "no single list of layers in it"
            )
            refuse(f"{config.model_type!r} has a pipeline plan, but {what}")
        index = plan.index(lists[0])
        before = (*plan[:index], *unplanned)
        return cls(before=before, layers=plan[index], after=tuple(plan[index + 1 :]))

    @classmethod
    def watched(cls, config: Any) -> Pieces:
        """Runs the model's miniature and sees which pieces come before its first layer and which
        later.

        So their order in the class does not matter: OPT declares its final norm before its layers.
        Raises Invalid if there is no single list of layers, or the miniature does not run.
        """
        miniature = build_miniature(miniature_config(config))
        base = language_model(miniature)
        sizes = text_config(miniature.config)
        alike = [name for name, module in base.named_modules() if _are_layers(module, sizes)]
        # Within a layer there may be the same number of modules of another kind, such as a norm
        # for each head
        lists = [name for name in alike if not any(name.startswith(f"{other}.") for other in alike)]
        if len(lists) != 1:
            refuse(
                f"{type(base).__name__} has {len(lists) or 'no'} lists of "
                "as many modules as it has layers"
            )
        first = base.get_submodule(lists[0])[0]
        pieces = {name: base.get_submodule(name) for name in _pieces_around(base, lists[0])}
        outputs: list[Any] = []
        hook = first.register_forward_hook(lambda *called: outputs.append(called[-1]))
        order = _order_of_calls(miniature, [first, *pieces.values()])
        hook.remove()
        if first not in order:
            refuse(f"{type(base).__name__} does not call its layers one by one")
        early = order[: order.index(first)]
        late = order[order.index(first) :]
        before = tuple(
            name for name, piece in pieces.items() if piece in early and _has_weights(piece)
        )
        after = tuple(name for name, piece in pieces.items() if piece in late)
        num_outputs = len(outputs[0]) if isinstance(outputs[0], tuple) else None
        return cls(before=before, layers=lists[0], after=after, num_outputs=num_outputs)


def _order_of_calls(model: Any, modules: list[nn.Module]) -> list[nn.Module]:
    """Those of the modules that the model's forward calls, in the order of their first calls."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda called, _: order.append(called))
        for module in modules
    ]
    try:
        with torch.inference_mode():
            model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False)
    except FAILURES as error:
        refuse(
            f"{type(model).__name__} does not run in a small size: {first_line(error)}", cause=error
        )
    finally:
        for hook in hooks:
            hook.remove()
    return order


def _pieces_around(base: nn.Module, layers: str) -> Iterator[str]:
    """Yields the names of all modules other than the layers and the modules that hold these."""
    path = layers.split(".")
    for depth, on_path in enumerate(path):
        for name, _ in base.get_submodule(".".join(path[:depth])).named_children():
            if name != on_path:
                yield ".".join([*path[:depth], name])


def _are_layers(module: nn.Module, config: Any) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
