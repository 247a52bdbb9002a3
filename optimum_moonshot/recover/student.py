"""A trained block: float32 copies of its tensors with the pruned weights, its inputs and its targets.

The user's model is not changed: `torch.func.functional_call` runs its code with these copies.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..data.batches import Batch
from ..errors import require
from ..model.calls import BlockCall, first_tensor, join_hidden, to_device
from ..model.layers import Block, PrunableLayer
from ..model.losses import token_mask
from ..objective.patterns import Pattern
from .grid_weights import GridWeight

TINY = 1e-12  # lower bound of |target|² in the relative error
SCALE_LR = 0.3  # learning rate of the scales of a grid, relative to that of the weights
VECTOR_LR = 0.3  # that of norms and biases

Tensors = dict[str, Tensor]


class Student:
    """The tensors of a dense block with its pruned weights in float32.

    `weights` has the pruned matrix [d_out, d_in] of every layer with a parameter in the block; only those of `tuned`
    are trained. A layer whose pattern has a grid trains latent weights and the scales of the grid. `others` are the
    names of parameters in the block that train as well: matrices without their zeros, vectors whole. `instead` has
    tensors by name in place of dense ones, also smaller ones.
    """

    def __init__(
        self,
        block: Block,
        weights: list[tuple[PrunableLayer, Tensor]],
        tuned: set[str],
        patterns: Mapping[str, Pattern] | None = None,
        others: Collection[str] = (),
        instead: Mapping[str, Tensor] | None = None,
    ):
        self.block = block
        parameters = dict(block.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.dense = {**parameters, **dict(block.module.named_buffers())}
        replaced = {names[id(layer.parameter)] for layer, _ in weights}
        rest = {name: tensor.detach() for name, tensor in self.dense.items() if name not in replaced}
        rest |= {name: tensor.to(self.dense[name].device) for name, tensor in (instead or {}).items()}
        self.latent = {name: _float32(tensor) for name, tensor in rest.items()}
        self.trained: dict[str, PrunableLayer] = {}  # by the name of the tensor
        self.keep: Tensors = {}  # bool, True where a weight survives and trains; absent: everywhere
        self.patterns = patterns or {}  # by layer, with the dtype of the model
        self.grids: dict[str, GridWeight] = {}  # of the layers that train on a grid, by the name of the tensor
        for layer, weight in weights:
            name = names[id(layer.parameter)]
            pruned = layer.as_parameter(weight).to(layer.parameter.device, torch.float32, copy=True).contiguous()
            trains = layer.name in tuned and bool(pruned.any())
            self.latent[name] = parameter = nn.Parameter(pruned, requires_grad=trains)
            if trains:
                self.trained[name] = replace(layer, substitute=parameter)
                self.keep[name] = pruned != 0
        self.others = self._train_others(name for name in others if name not in replaced)
        self.to_grids()

    def _train_others(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Give latent copies of some parameters gradients; matrices keep their zeros."""
        others = {}
        for name in names:
            tensor = self.latent[name].clone()
            if tensor.ndim > 1 and not bool(tensor.any()):
                continue
            if tensor.ndim > 1 and not bool(tensor.all()):
                self.keep[name] = tensor != 0
            self.latent[name] = others[name] = nn.Parameter(tensor)
        return others

    @property
    def tensors(self) -> Tensors:
        """The block's tensors in float32, with gradients of all that trains."""
        return {**self.latent, **{name: weight.parameter() for name, weight in self.grids.items()}}

    @property
    def layers(self) -> list[PrunableLayer]:
        """The pruned ones that train."""
        return list(self.trained.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        pruned = [layer.parameter for layer in self.layers] + [weight.scale for weight in self.grids.values()]
        return [*pruned, *self.others.values()]

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Optimizer groups: the rate of a layer is `lr` times the root mean square of its surviving weights.

        That of its scales is `SCALE_LR` · `lr` times their root mean square. Of the other parameters, a matrix has the
        rate of a layer; see `_vector_scale` for a vector.
        """
        trained = [(layer.parameter, self.keep[name], lr) for name, layer in self.trained.items()]
        trained += [(weight.scale, weight.scale != 0, SCALE_LR * lr) for weight in self.grids.values()]
        groups = [(parameter, rate * _scale(parameter.detach()[keep])) for parameter, keep, rate in trained]
        for name, parameter in self.others.items():
            matrix = parameter.detach()[self.keep[name]] if name in self.keep else parameter.detach()
            scale = _scale(matrix) if parameter.ndim > 1 else VECTOR_LR * self._vector_scale(name)
            groups.append((parameter, lr * scale))
        return [{"params": [parameter], "lr": rate} for parameter, rate in groups]

    def _vector_scale(self, name: str) -> float:
        """The root mean square of a vector or, of a bias, of the weight beside it: a bias may be zero."""
        owner, _, key = name.rpartition(".")
        weight = self.latent.get(f"{owner}.weight") if key == "bias" else None
        return _scale((self.latent[name] if weight is None else weight).detach())

    def mask_gradients(self) -> None:
        """Set the gradients of removed weights to zero, so that Adam does not change them."""
        for name, keep in self.keep.items():
            gradient = self.latent[name].grad
            if gradient is not None:  # some parameters may take no part
                gradient.mul_(keep)

    def rounded(self) -> Tensors:
        """The block's tensors in the dtypes of the model."""
        return {name: self._rounded(name, tensor) for name, tensor in self.tensors.items()}

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dense[name].dtype)

    def matrices(self) -> Tensors:
        """The trained weights by layer, [d_out, d_in] in the model's dtype."""
        tensors = self.rounded()
        return {layer.name: layer.as_matrix(tensors[name]) for name, layer in self.trained.items()}

    def changed(self) -> Tensors:
        """The other parameters that train, by their names in the model, in its dtype."""
        return {f"{self.block.name}.{name}": self._rounded(name, self.latent[name]) for name in self.others}

    @torch.no_grad()
    def to_dense(self) -> None:
        """Reset every trained layer to its dense weight; it trains freely until `to_grids`."""
        self.grids.clear()
        for name, layer in self.trained.items():
            layer.parameter.copy_(self.dense[name])

    @torch.no_grad()
    def prune(self, weights: Tensors) -> None:
        """Replace the weights [d_out, d_in] of layers; their zeros are the new masks."""
        for name, layer in self.trained.items():
            if layer.name in weights:
                layer.assign(weights[layer.name])
                self.keep[name] = layer.parameter.detach() != 0

    def to_grids(self) -> None:
        """Train the layers whose patterns have grids on them from now on.

        Raises:
            MoonshotError: their weights are not on the grids.
        """
        for name, layer in self.trained.items():
            pattern = self.patterns.get(layer.name)
            if pattern is not None and pattern.grid is not None:
                self.grids[name] = GridWeight.restore(layer, pattern.grid)
                if not pattern.sparsity:  # a zero is a code, unless the weight was zero before the run
                    self.keep[name] = self.dense[name].detach() != 0

    def snapshot(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        for parameter, saved in zip(self.parameters, snapshot, strict=True):
            parameter.copy_(saved)


def _scale(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@dataclass
class BlockTask:
    """The cached inputs and targets of a block on every batch, and the relative error between outputs and targets.

    `tensors` replace the block's parameters and buffers by name; hidden states are [B, T, D], or of another shape that
    the block reads.
    """

    module: nn.Module
    calls: list[BlockCall]
    inputs: list[Tensor]  # h
    targets: list[Tensor]  # g(d)
    masks: list[Tensor | None]  # bool [B, T], True where a token counts; None: everywhere

    def output(self, index: int, tensors: Tensors, hidden: Tensor, widen: bool = False) -> Tensor:
        """The block's output for a hidden state of batch `index`; `widen` computes in float32."""
        device = next(iter(tensors.values())).device
        arguments = to_device(join_hidden(hidden, self.calls[index]), device)
        args, kwargs = tree_map_only(Tensor, _float32, arguments) if widen else arguments
        return first_tensor(functional_call(self.module, tensors, args, kwargs))

    def error(self, index: int, tensors: Tensors, widen: bool = False) -> Tensor:
        """Σ |output - target|² / |target|² over the tokens of a batch without padding: a scalar with its graph."""
        output = positions(self.output(index, tensors, self.inputs[index], widen)).float()
        target = positions(self.targets[index]).to(output.device).float()
        errors = (output - target).square().sum(-1) / target.square().sum(-1).clamp_min(TINY)
        mask = self.masks[index]
        return errors.sum() if mask is None else errors[mask.to(errors.device)].sum()

    def tokens(self, indices: list[int]) -> int:
        """The number of tokens in some batches without padding."""
        pairs = ((self.masks[index], self.targets[index]) for index in indices)
        return sum(positions(target)[..., 0].numel() if mask is None else int(mask.sum()) for mask, target in pairs)

    @torch.no_grad()
    def loss(self, indices: list[int], tensors: Tensors) -> float:
        """The mean relative squared error over the tokens of some batches."""
        return sum(self.error(index, tensors).item() for index in indices) / self.tokens(indices)

    @torch.no_grad()
    def advance(self, states: list[Tensor], tensors: Tensors) -> None:
        """Replace the hidden states of all batches by the block's outputs, in place."""
        for index, state in enumerate(states):
            state.copy_(self.output(index, tensors, state))


def positions(hidden: Tensor) -> Tensor:
    """A hidden state as [B, T, D]; one of another number of dimensions has one position per sample."""
    return hidden if hidden.ndim == 3 else hidden.flatten(1)[:, None]


def padding_mask(batch: Batch, hidden: Tensor) -> Tensor | None:
    """True at the positions of a hidden state without padding; None: everywhere."""
    mask = token_mask(batch)
    if mask is None or bool(mask.all()):
        return None
    require(
        positions(hidden).shape[:2] == mask.shape,
        f"hidden states of shape {list(hidden.shape)} do not show which tokens are padding",
        field="recover",
        hint="use samples of equal length",
    )
    return mask
