"""Linear layers, word embeddings and experts whose weights stay packed in memory.

A head that is tied to word embeddings multiplies by the same tensors.

The module of a layer's experts computes the same as transformers' implementations ("grouped_mm", "batched_mm",
"eager"), with the flags and functions of the module that it replaces: `has_gate`, `has_bias`, `is_transposed`,
`_apply_gate`. All tokens of an expert are multiplied at once, and all experts in one call of the codec.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import MoonshotError, require
from ..objective.patterns import NM
from ..packing import Codec
from .packed_module import PackedMatrix, PackedModule, is_intercepted

_WEIGHT = "weight"  # its name in a Linear and an Embedding
_DIRECT = "direct"  # key of the cached `Codec.direct`
_FLAGS = ("has_gate", "has_bias", "is_transposed")  # set by transformers' decorator of modules of experts
_DOWN = "down_proj"
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class PackedLinear(PackedModule):
    """A Linear (or GPT-2's Conv1D) whose weight stays packed in memory; the codec multiplies by it.

    `parts` may be empty tensors to load into. `origin` is the layer that it replaces, if any; `pattern` is the n:m of
    all rows, if any, and `owner` the module with its tensors, if its weight is tied.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        bias: nn.Parameter | None = None,
        origin: nn.Module | None = None,
        pattern: NM | None = None,
        owner: PackedModule | None = None,
    ):
        super().__init__(origin, owner)
        self.out_features, self.in_features = shape
        self.pattern = pattern
        self.register_packed(_WEIGHT, PackedMatrix(codec, shape), parts)
        self._stored = tuple(codec.names(_WEIGHT).values())
        self.register_parameter("bias", bias)

    @property
    def codec(self) -> Codec:
        """The format."""
        return self.packed[_WEIGHT].codec

    @property
    def shape(self) -> tuple[int, int]:
        """d_out, d_in."""
        return self.out_features, self.in_features

    @property
    def parts(self) -> dict[str, Tensor]:
        """The packed tensors, by their suffixes."""
        return self.parts_of(_WEIGHT)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.dtype_of(_WEIGHT)

    @property
    def plan(self) -> Any:
        """The codec's plan of the tensors, cached until they are moved or loaded again."""
        return self.plan_of(_WEIGHT)

    @property
    def weight(self) -> Tensor:
        """The dense weight [d_out, d_in], unpacked on every access."""
        return self.initialized(self.matrix_of(_WEIGHT))

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Replace the weight [d_out, d_in].

        Raises:
            MoonshotError: the format cannot represent these values, or another module has the weight too; the layer is
                unchanged.
        """
        hint = "call model.dequantize() first, or keep an adapter unmerged, beside the weight"
        require(self.owner is self, "it is tied to the word embeddings, which would change too", hint=hint)
        try:
            parts = self.codec.pack(weight.detach().cpu(), self.pattern)
            exact = torch.equal(self.codec.unpack(parts, self.shape), weight.cpu())
        except MoonshotError:
            exact = False
        require(exact, f"{self.codec.name} cannot represent the new weight", hint=hint)
        parts = {suffix: part.to(weight.device) for suffix, part in parts.items()}
        self.register_packed(_WEIGHT, self.packed[_WEIGHT], parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., d_in] → [..., d_out]."""
        if (outputs := self._directly(inputs)) is not None:
            return outputs
        device = inputs.device.type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != self.dtype:
            return self.codec.linear(inputs, self.parts, self.shape, self.bias, self.plan)
        # Like autocast for a Linear. The codec would unpack the weight, and autograd would keep the dense one.
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return self.codec.linear(inputs.to(self.dtype), self.parts, self.shape, bias, self.plan)

    def _directly(self, inputs: Tensor) -> Tensor | None:
        """The product by `Codec.direct`; None where another kind of call is necessary."""
        if torch.compiler.is_compiling() or type(inputs) is not Tensor or inputs.device.type != "cpu":
            return None
        bias = self._parameters["bias"]
        differentiable = inputs.requires_grad or (bias is not None and bias.requires_grad)
        if (differentiable and torch.is_grad_enabled()) or is_intercepted() or torch.is_autocast_enabled("cpu"):
            return None
        # The tensors may have been replaced, or moved, without a call of this class.
        buffers = self.owner._buffers
        addresses = [buffers[name].data_ptr() for name in self._stored]  # type: ignore[union-attr]
        addresses.append(0 if bias is None else bias.data_ptr())
        if self._plans.get(_DIRECT, (None,))[0] != addresses:
            direct = self.codec.direct(self.parts, self.shape, bias, self.plan)
            self._plans[_DIRECT] = addresses, self.dtype, direct
        _, dtype, direct = self._plans[_DIRECT]
        fits = direct is not None and inputs.dtype == dtype and inputs.shape[-1] == self.in_features
        return direct(inputs) if fits and inputs.is_contiguous() else None

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.codec.name}"


def lookup_obstacle(embedding: nn.Embedding) -> str | None:
    """The reason why the weight of an embedding cannot be packed in memory, if any."""
    return None if embedding.max_norm is None else "its rows are normalized in every call"


class PackedEmbedding(PackedModule):
    """An Embedding, perhaps of a derived class such as a scaled one, whose weight stays packed in memory.

    `parts` may be empty tensors to load into; with a tied weight, `owner` has the tensors. A derived class computes its
    output from the rows that are looked up: it is called with these as its weight.
    """

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        origin: nn.Embedding,
        owner: PackedModule | None = None,
    ):
        super().__init__(origin, owner)
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx = origin.padding_idx
        self.register_packed(_WEIGHT, PackedMatrix(codec, shape), parts)
        for name, buffer in origin._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in origin._non_persistent_buffers_set)
        derived = copy.copy(origin)
        derived.padding_idx = None  # an index into all rows, for gradients only
        self._derived = (None if type(origin).forward is nn.Embedding.forward else derived,)

    @property
    def codec(self) -> Codec:
        """The format."""
        return self.packed[_WEIGHT].codec

    @property
    def weight(self) -> Tensor:
        """The dense weight [num_embeddings, embedding_dim], unpacked on every access."""
        return self.initialized(self.matrix_of(_WEIGHT))

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape → [*input.shape, embedding_dim]."""
        codec, shape = self.packed[_WEIGHT]
        rows = codec.lookup(input, self.parts_of(_WEIGHT), shape, self.plan_of(_WEIGHT))
        derived = self._derived[0]
        if derived is None:
            return rows
        places = torch.arange(input.numel(), device=input.device).view(input.shape)
        tensors: dict[str, Any] = {
            _WEIGHT: rows.flatten(0, -2),
            **{name: self._buffers[name] for name in derived._buffers},
        }
        outputs: Tensor = torch.func.functional_call(derived, tensors, (places,))
        return outputs

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.codec.name}"


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
