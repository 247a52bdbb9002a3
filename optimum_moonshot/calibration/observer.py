"""Running statistics of layers, gathered by hooks: Gram matrices and per-sample gradients, in float32.

Tensor format: the inputs of a layer are x [B, T, d_in] and the gradients of its outputs δ [B, T, d_out], so sample n
adds ``Σ_t x_t x_tᵀ`` to G and has the gradient ``A_n = Σ_t δ_t x_tᵀ``. Padding tokens count in neither. A convolution
is the same with the patches of its input as x, strip by strip of output rows; where it has groups, each is one more
matrix x with rows of its own, and G is [groups, d_in, d_in].
"""

from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn

from ..errors import MoonshotError, require
from ..model.convolution import batched, joined, strip_of, strips
from ..model.layers import PrunableLayer
from ..objective.linalg import all_finite
from .accumulators import LayerTotals, Plan, RowMatrices, Samples, Squares
from .layer_statistics import Call, InputStatistics, LayerStatistics
from .memory import Storage


class Collector(AbstractContextManager):
    """Hooks on layers, removed on exit, whatever happens.

    A batch's inputs and gradients go from here, as matrices, to `InputStatistics` and to the `accumulators`.

    Args:
        layers: to observe.
        diagonal: gather only the diagonals (Wanda): A_n is squared and added sample by sample, never stored.
        with_gradients: names of the layers whose gradients are wanted; the caller runs backward passes.
        samples: N, calibration samples in all.
        storage: where the accumulators live.
        plans: how to gather the gradients of layers by their name; those of the others are kept as they are.
        share: layers that read the same tensor have one accumulator; a batch's inputs then live until its end.
    """

    def __init__(
        self,
        layers: list[PrunableLayer],
        diagonal: bool,
        with_gradients: set[str],
        samples: int,
        storage: Storage,
        plans: dict[str, Plan] | None = None,
        share: bool = True,
    ):
        self.layers, self.diagonal, self.samples, self.storage = layers, diagonal, samples, storage
        self.share = share
        self.inputs: dict[str, InputStatistics] = {}
        self.by_tensor: dict[int, InputStatistics] = {}
        self.added: set[tuple[int, int]] = set()
        self.held: list[Tensor] = []
        self.totals: dict[str, LayerTotals] = {}
        self.gradients = {
            layer.name: self._accumulator(layer, (plans or {}).get(layer.name, Plan()))
            for layer in layers
            if layer.name in with_gradients
        }
        self.calls: dict[str, int] = {}
        self.mask: Tensor | None = None
        self.count = 0
        self._hooks = ExitStack()

    def _accumulator(self, layer: PrunableLayer, plan: Plan) -> Samples | Squares | RowMatrices:
        if plan.totals is not None:
            self.totals[layer.name] = LayerTotals(layer, self.samples, plan.totals)
        if self.diagonal:
            return Squares(layer, self.storage)
        return (Samples if plan.column_block is None else RowMatrices)(layer, self.samples, self.storage, plan)

    def __enter__(self) -> "Collector":
        for layer in self.layers:
            for module in layer.modules:
                handle = module.register_forward_hook(
                    lambda module, args, output, layer=layer: self._observe(layer, module, args[0].detach(), output)
                )
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.close()
        self._forget()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch: samples `first` to `first + count`, and the mask [B, T] of its tokens, None for all."""
        self.count, self.mask = count, mask
        self.calls.clear()
        for accumulator in (*self.gradients.values(), *self.totals.values()):
            accumulator.begin(first, count)

    def end(self) -> None:
        """Close a batch: check that layers which share a Gram matrix did read the same tensors."""
        for statistics in self.inputs.values():
            if len({tuple(read) for read in statistics.readers.values()}) > 1:
                raise MoonshotError(f"layers {sorted(statistics.readers)} read the same tensor in some batches only")
            for read in statistics.readers.values():
                read.clear()
        for accumulator in (*self.gradients.values(), *self.totals.values()):
            accumulator.end()
        self._forget()

    def _forget(self) -> None:
        self.by_tensor.clear()
        self.added.clear()
        self.held.clear()

    def _observe(self, layer: PrunableLayer, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor | None:
        """Add a call's inputs, and its gradient once it is known. Returns a new output where the graph begins here."""
        mask = None if isinstance(module, nn.Conv2d) else self._token_mask(layer.name, inputs)
        call = Call(layer, module, inputs, inputs._version, mask)
        self._add_inputs(call)
        if layer.name not in self.gradients or not torch.is_grad_enabled():
            return None
        self.calls[layer.name] = self.calls.get(layer.name, 0) + 1
        begins = not output.requires_grad
        if begins:  # not as a leaf: an activation may work on it in place
            output = output.detach().requires_grad_(True).clone()
        output.register_hook(lambda delta: self._add_gradient(call, delta))
        return output if begins else None

    def _token_mask(self, name: str, inputs: Tensor) -> Tensor | None:
        """The batch's token mask as this layer's inputs are laid out; None where every position counts."""
        lead = inputs.shape[:-1]
        if self.mask is None:
            return None
        if lead == self.mask.shape:
            return self.mask
        if lead.numel() == self.mask.numel():
            return self.mask.reshape(lead)
        require(
            bool(self.mask.all()),
            f"{name}: inputs of shape {list(inputs.shape)} do not show which tokens are padding: "
            "use samples of equal length, or batch_size=1",
        )
        return None

    def _add_inputs(self, call: "Call") -> None:
        """Add to the layer's G, once per tensor: layers that read the same tensor alike share one G."""
        name, inputs = call.layer.name, call.inputs
        if not self.share:
            if name not in self.inputs:
                self.inputs[name] = self._input_buffer(call.layer, inputs.device)
            self.inputs[name].add_call(call)
            return
        key = hash((inputs.data_ptr(), inputs.shape, inputs.stride(), call.read_as))
        if name not in self.inputs:
            self.inputs[name] = self.by_tensor.get(key) or self._input_buffer(call.layer, inputs.device)
        mine = self.inputs[name]
        self.by_tensor.setdefault(key, mine)
        mine.readers.setdefault(name, []).append(key)
        if (id(mine), key) not in self.added:
            self.added.add((id(mine), key))
            self.held.append(inputs)  # while it lives, its address names it
            mine.add_call(call)

    def _input_buffer(self, layer: PrunableLayer, device: torch.device) -> InputStatistics:
        size = layer.shape[1]
        shape = (size,) if self.diagonal else (size, size)
        shape = shape if layer.groups == 1 else (layer.groups, *shape)
        value = self.storage.zeros(shape, torch.float32, f"{layer.name}: Gram matrix").to(device)
        return InputStatistics(value, self.diagonal)

    def _add_gradient(self, call: "Call", delta: Tensor) -> None:
        name = call.layer.name
        require(
            call.inputs._version == call.version,
            f"{name}: the model changes this layer's input in place after the call; use inplace=False, or set lam=1",
        )
        self.calls[name] -= 1
        done = self.calls[name] == 0
        if isinstance(call.module, nn.Conv2d):
            for strip in strips(call.module, batched(call.inputs)):
                deltas = strip_of(batched(delta), strip.rows, call.layer.groups)
                pair = (self._strip_per_sample(name, part) for part in (strip.patches, deltas))
                self._accumulate(name, *pair, done and strip.last)
            return
        inputs, delta = self._per_sample(name, call.inputs), self._per_sample(name, delta)
        if call.mask is not None:
            delta = delta.masked_fill(~call.mask.reshape(delta.shape[:2])[..., None], 0)
        self._accumulate(name, inputs, delta, done)

    def _accumulate(self, name: str, inputs: Tensor, delta: Tensor, done: bool) -> None:
        """Add δᵀx of [B·groups, T, d_in] and [B·groups, T, d_out/groups]; `done` marks the last of a batch."""
        inputs, delta = inputs.float(), delta.float()
        for gathered in (self.gradients, self.totals):
            if name in gathered:
                gathered[name].add(inputs, delta, done)

    def _per_sample(self, name: str, tensor: Tensor) -> Tensor:
        """Inputs or gradients of a linear layer as [B, T, d]."""
        if tensor.shape[0] != self.count:
            tokens = tensor.shape[:-1].numel()
            self._check_samples(name, tensor, flattened=self.mask is not None and tokens == self.mask.numel())
        return tensor.reshape(self.count, -1, tensor.shape[-1])

    def _strip_per_sample(self, name: str, tensor: Tensor) -> Tensor:
        """A convolution's patches or gradients [images, groups, T, d] as [B·groups, T, d]."""
        if tensor.shape[0] != self.count:
            self._check_samples(name, tensor, flattened=False)
            tensor = joined(tensor)[None]
        return tensor.flatten(0, 1)

    def _check_samples(self, name: str, tensor: Tensor, flattened: bool) -> None:
        require(
            self.count == 1 or flattened,
            f"{name}: inputs of shape {list(tensor.shape)} do not show which of the batch's {self.count} samples they "
            "belong to: use batch_size=1",
        )

    def take(self, layer: PrunableLayer) -> LayerStatistics:
        """What was gathered for a layer, checked, and forgotten here, so that its memory ends with the caller's use.

        Raises:
            MoonshotError: the calibration data never reached the layer, or gave NaN or infinity.
        """
        name = layer.name
        require(
            name in self.inputs, f"{name}: no calibration data reached this layer; add its name to ignore= to skip it"
        )
        inputs, gradients = self.inputs.pop(name).value, self.gradients.pop(name, None)
        gradients = gradients and gradients.result()
        diagonal = inputs if self.diagonal else inputs.diagonal(dim1=-2, dim2=-1)
        _check_finite(all_finite(diagonal), f"{name}: its inputs (activations)")
        if gradients is not None:
            finite = all_finite(gradients) if self.diagonal else gradients.is_finite()
            _check_finite(finite, f"{name}: its gradients")
        return LayerStatistics(inputs, gradients, self.samples, self.diagonal, self.totals.pop(name, None))


def _check_finite(finite: bool, what: str) -> None:
    require(
        finite,
        f"{what} hold NaN or infinite values: check the model's weights and dtype (float16 overflows; use bfloat16)",
    )
