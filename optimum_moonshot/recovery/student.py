"""A block that learns: its tensors with pruned weights in float32, and what it has to do again.

The user's model only lends its code: a block runs with copies of its weights put in place of its own for the call
(`torch.func.functional_call`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..model.calls import BlockCall, first_tensor, join_hidden, to_device
from ..model.layers import Block, PrunableLayer

TINY = 1e-12  # |target|² below which a token's error is no longer relative

Tensors = dict[str, Tensor]


class Student:
    """A block's tensors with its pruned weights in float32, and which of them train.

    Args:
        block: of the dense model.
        weights: the pruned matrices [d_out, d_in] of all layers with a part in the block.
        tuned: names of the layers that train.
    """

    def __init__(self, block: Block, weights: list[tuple[PrunableLayer, Tensor]], tuned: set[str]):
        parameters = dict(block.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.dense = {**parameters, **dict(block.module.named_buffers())}
        replaced = {names[id(layer.parameter)] for layer, _ in weights}
        others = {name: tensor.detach() for name, tensor in self.dense.items() if name not in replaced}
        self.tensors = {name: _float32(tensor) for name, tensor in others.items()}
        self.trained: dict[str, PrunableLayer] = {}  # by the name of the tensor
        self.keep: Tensors = {}  # bool, True where a weight survives and trains
        for layer, weight in weights:
            name = names[id(layer.parameter)]
            pruned = layer.as_parameter(weight).to(layer.parameter.device, torch.float32, copy=True).contiguous()
            trains = layer.name in tuned and bool(pruned.any())
            self.tensors[name] = parameter = nn.Parameter(pruned, requires_grad=trains)
            if trains:
                self.trained[name] = replace(layer, substitute=parameter)
                self.keep[name] = pruned != 0

    @property
    def layers(self) -> list[PrunableLayer]:
        """Those that train."""
        return list(self.trained.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [layer.parameter for layer in self.layers]

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """For an optimizer: every layer's rate is `lr` times the root mean square of its surviving weights."""
        return [
            {"params": [layer.parameter], "lr": lr * float(layer.parameter.detach()[keep].square().mean().sqrt())}
            for layer, keep in zip(self.layers, self.keep.values(), strict=True)
        ]

    def mask_gradients(self) -> None:
        """Weights at zero get no gradient, and Adam leaves them there exactly."""
        for name, layer in self.trained.items():
            gradient = layer.parameter.grad
            assert gradient is not None  # a backward pass has run
            gradient.mul_(self.keep[name])

    def rounded(self) -> Tensors:
        """The block's tensors as they will be in the model, in its dtypes."""
        return {name: tensor.detach().to(self.dense[name].dtype) for name, tensor in self.tensors.items()}

    def matrices(self) -> Tensors:
        """The trained weights by layer, [d_out, d_in] in the model's dtype."""
        tensors = self.rounded()
        return {layer.name: layer.as_matrix(tensors[name]) for name, layer in self.trained.items()}

    @torch.no_grad()
    def to_dense(self) -> None:
        """Start anew: every layer that trains has its dense weight."""
        for name, layer in self.trained.items():
            layer.parameter.copy_(self.dense[name])

    @torch.no_grad()
    def prune(self, weights: Tensors) -> None:
        """Give layers new weights, whose zeros stay from here on.

        Args:
            weights: layer → [d_out, d_in].
        """
        for name, layer in self.trained.items():
            if layer.name in weights:
                layer.assign(weights[layer.name])
                self.keep[name] = layer.parameter.detach() != 0

    def snapshot(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        for parameter, saved in zip(self.parameters, snapshot, strict=True):
            parameter.copy_(saved)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@dataclass
class Task:
    """What a block has to learn: its inputs and targets on every batch, in caches, and how both are compared."""

    module: nn.Module
    calls: list[BlockCall]
    inputs: list[Tensor]  # h, [B, T, D] or of any shape that the block reads
    targets: list[Tensor]  # g(d), of the same shape
    masks: list[Tensor | None]  # bool [B, T], True where a token counts; None for all

    def output(self, index: int, tensors: Tensors, hidden: Tensor, widen: bool = False) -> Tensor:
        """The block's output on a batch, of the shape of `hidden`.

        Args:
            index: the batch's number.
            tensors: in place of the block's own parameters and buffers, by their names.
            hidden: what the block reads, [B, T, D] or of any shape that it takes.
            widen: compute in float32, whatever the dtype of the inputs.
        """
        device = next(iter(tensors.values())).device
        arguments = to_device(join_hidden(hidden, self.calls[index]), device)
        args, kwargs = tree_map_only(Tensor, _float32, arguments) if widen else arguments
        return first_tensor(functional_call(self.module, tensors, args, kwargs))

    def error(self, index: int, tensors: Tensors, widen: bool = False) -> Tensor:
        """Σ |output - target|² / |target|² over a batch's tokens, padding left out: a number, with its graph.

        Args:
            index: as for `output`.
            tensors: as for `output`.
            widen: as for `output`.
        """
        output = positions(self.output(index, tensors, self.inputs[index], widen)).float()
        target = positions(self.targets[index]).to(output.device).float()
        errors = (output - target).square().sum(-1) / target.square().sum(-1).clamp_min(TINY)
        mask = self.masks[index]
        return errors.sum() if mask is None else errors[mask.to(errors.device)].sum()

    def tokens(self, indices: list[int]) -> int:
        """How many tokens count in these batches."""
        pairs = ((self.masks[index], self.targets[index]) for index in indices)
        return sum(positions(target)[..., 0].numel() if mask is None else int(mask.sum()) for mask, target in pairs)

    @torch.no_grad()
    def loss(self, indices: list[int], tensors: Tensors) -> float:
        """The mean relative squared error over the tokens of some batches.

        Args:
            indices: the batches' numbers.
            tensors: as for `output`.
        """
        return sum(self.error(index, tensors).item() for index in indices) / self.tokens(indices)

    @torch.no_grad()
    def advance(self, states: list[Tensor], tensors: Tensors) -> None:
        """Replace the block's inputs by its outputs.

        Args:
            states: what the block reads, for every batch, [B, T, D] or of any shape that it takes; changed in place.
            tensors: as for `output`.
        """
        for index, state in enumerate(states):
            state.copy_(self.output(index, tensors, state))


def positions(hidden: Tensor) -> Tensor:
    """[B, T, D]; a hidden state of another rank is one position per sample."""
    return hidden if hidden.ndim == 3 else hidden.flatten(1)[:, None]
