"""The experts of a layer, whose fused weights stay packed in memory.

The module computes the same as transformers' implementations of experts ("grouped_mm", "batched_mm", "eager"), with
the flags and functions of the module that it replaces: `has_gate`, `has_bias`, `is_transposed`, `_apply_gate`. All
tokens of an expert are multiplied at once, and all experts in one call of the codec.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .packed_module import PackedMatrix, PackedModule

_FLAGS = ("has_gate", "has_bias", "is_transposed")  # set by transformers' decorator of modules of experts
_DOWN = "down_proj"
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def mixture_obstacle(module: nn.Module) -> str | None:
    """The reason why the fused weights of a module of experts cannot be packed in memory, if any."""
    flags = vars(module)
    decorated = all(isinstance(flags.get(flag), bool) for flag in _FLAGS)
    dispatching = hasattr(type(module).forward, "__wrapped__")  # a subclass may have a forward of its own
    if not (decorated and dispatching and {_up(module), _DOWN} <= {*module._parameters}):
        return f"{type(module).__name__} multiplies its experts itself"
    return None


def _up(module: nn.Module) -> str:
    return "gate_up_proj" if cast(Any, module).has_gate else "up_proj"


class PackedMixture(PackedModule):
    """A module of experts with packed weights; each is the stack [E·out, in] of the matrices of all experts.

    Weights that are not packed remain parameters. It has the submodules of the origin, whose methods apply gates.
    """

    def __init__(self, origin: nn.Module):
        super().__init__(origin)
        for name, parameter in origin._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in origin._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in origin._non_persistent_buffers_set)
        for name, module in origin._modules.items():
            self.add_module(name, module)
        self.train(origin.training)
        weight = origin._parameters[_DOWN]
        assert weight is not None
        self.experts = len(weight)

    def __getattr__(self, name: str) -> Any:
        """Unpack a packed weight on every access: some models read their weights when they are loaded."""
        return self.initialized(self.dense(name)) if name in vars(self).get("packed", ()) else super().__getattr__(name)

    @property
    def is_transposed(self) -> bool:
        """Whether the dense weights are [E, in, out]."""
        return bool(cast(Any, self.origin).is_transposed)

    def register_packed(self, weight: str, matrix: PackedMatrix, parts: Mapping[str, Tensor]) -> None:
        super().register_packed(weight, matrix, parts)
        del self._parameters[weight]

    def unpack(self, weight: str) -> None:
        """Convert a packed weight to a parameter again, of this module and the origin."""
        origin = cast(nn.Module, self.origin)
        parameter = nn.Parameter(self.dense(weight), origin.get_parameter(weight).requires_grad)
        for name in self.packed.pop(weight).codec.names(weight).values():
            del self._buffers[name]
        self._plans.clear()
        origin._parameters[weight] = parameter
        self.register_parameter(weight, parameter)

    @torch.no_grad()
    def dense(self, weight: str) -> Tensor:
        """A packed weight in the layout of the origin, [E, out, in] or [E, in, out]."""
        matrices = self.matrix_of(weight).unflatten(0, (self.experts, -1))
        return matrices.transpose(1, 2).contiguous() if self.is_transposed else matrices

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] → [T, H], by the indices and the weights of every token's experts, [T, k].

        An index of E or more belongs to an expert in another process.
        """
        return apply_routed(self._experts, hidden_states, top_k_index, top_k_weights, self.experts)

    def _experts(self, inputs: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        origin = cast(Any, self.origin)
        up = self._product(_up(origin), inputs, counts, experts)
        inner = origin._apply_gate(up) if origin.has_gate else origin.act_fn(up)
        outputs = self._product(_DOWN, inner, counts, experts)
        return origin.post_expert_norm(outputs) if getattr(origin, "has_post_expert_norm", False) else outputs

    def _product(self, weight: str, inputs: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        if weight in self.packed:
            outputs = self._packed_product(weight, inputs, counts)
        else:
            dense = self.get_parameter(weight)
            outputs = dense_grouped(inputs, counts, dense.transpose(1, 2) if self.is_transposed else dense)
        bias = self._parameters.get(f"{weight}_bias")
        return outputs if bias is None else outputs + bias[experts]

    def _packed_product(self, weight: str, inputs: Tensor, counts: Tensor) -> Tensor:
        codec, shape = self.packed[weight]
        parts, plan = self.parts_of(weight), self.plan_of(weight)
        device, dtype = inputs.device.type, self.dtype_of(weight)
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
            return codec.grouped(inputs, counts, parts, shape, plan)
        with torch.autocast(device, enabled=False):  # like `PackedLinear.forward`
            return codec.grouped(inputs.to(dtype), counts, parts, shape, plan)

    def extra_repr(self) -> str:
        return ", ".join(f"{weight}: format={matrix.codec.name}" for weight, matrix in self.packed.items())


def apply_routed(compute: Experts, hidden: Tensor, index: Tensor, weights: Tensor, count: int) -> Tensor:
    """The weighted sums of the outputs of every token's experts, [T, H].

    Args:
        compute: the outputs [S, H] of the experts, from the inputs [S, H] of one expert after another, the number of
            inputs of each expert (int64 [E]), and the expert of each input, int64 [S], at most E − 1.
        hidden: the tokens [T, H].
        index: the experts of every token [T, k]; an index of E or more belongs to an expert in another process.
        weights: the weights of these experts [T, k].
        count: E, the number of experts.
    """
    experts, order = index.flatten().long().sort()
    counts = experts.new_zeros(count + 1)
    counts.scatter_add_(0, experts.clamp(max=count), torch.ones_like(experts))
    outputs = compute(hidden[order // index.shape[1]], counts[:-1], experts.clamp(max=count - 1))
    outputs = outputs * weights.flatten()[order].masked_fill(experts >= count, 0)[:, None]
    by_token = torch.zeros_like(outputs).index_copy(0, order, outputs)
    return by_token.unflatten(0, index.shape).sum(1).to(hidden.dtype)


@torch.library.custom_op("moonshot::dense_grouped", mutates_args=())
def dense_grouped(inputs: Tensor, counts: Tensor, matrices: Tensor) -> Tensor:
    """Like `Codec.grouped`, for dense matrices [groups, d_out, d_in]: one node for `torch.compile` and `export`."""
    groups = _split(inputs, counts)
    products = [functional.linear(group, matrix) for group, matrix in zip(groups, matrices, strict=True) if len(group)]
    return torch.cat([*products, inputs.new_zeros(len(inputs) - sum(map(len, groups)), matrices.shape[1])])


@torch.library.custom_op("moonshot::dense_grouped_weights", mutates_args=())
def _weight_gradients(outputs: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
    """The gradients [groups, d_out, d_in] of the matrices."""
    return torch.stack([y.T @ x for y, x in zip(_split(outputs, counts), _split(inputs, counts), strict=True)])


def _split(rows: Tensor, counts: Tensor) -> list[Tensor]:
    """The rows of each group."""
    sizes = counts.tolist()
    return [*rows[: sum(sizes)].split(sizes)]


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    inputs, counts, matrices = ctx.saved_tensors
    x = dense_grouped(outputs, counts, matrices.mT) if ctx.needs_input_grad[0] else None
    return x, None, _weight_gradients(outputs, inputs, counts) if ctx.needs_input_grad[2] else None


dense_grouped.register_fake(lambda x, counts, matrices: x.new_empty(x.shape[0], matrices.shape[1]))
_weight_gradients.register_fake(lambda y, x, counts: y.new_empty(counts.shape[0], y.shape[1], x.shape[1]))
dense_grouped.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
