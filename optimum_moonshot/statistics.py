"""Running statistics of linear layers, gathered by hooks: Gram matrices and per-sample gradients, in float32.

Tensor format: the inputs of a layer are x [B, T, d_in] and the gradients of its outputs δ [B, T, d_out], so sample n
adds ``Σ_t x_t x_tᵀ`` to G and has the gradient ``A_n = Σ_t δ_t x_tᵀ``. Padding tokens count in neither.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import MoonshotError, require
from .layers import PrunableLayer
from .linalg import all_finite
from .objective import DiagonalQuadratic, Quadratic
from .storage import Storage


@dataclass
class InputStatistics:
    """G [d_in, d_in], or its diagonal [d_in]; one object for all layers that read the same tensor (q, k and v)."""

    value: Tensor
    readers: dict[str, list[int]] = field(default_factory=dict)  # layer → ids of the tensors it read in this batch

    def add(self, inputs: Tensor) -> None:
        """Add a batch of inputs [tokens, d_in]."""
        inputs = inputs.float()
        if self.value.ndim == 1:
            self.value += inputs.square().sum(0)
        else:
            self.value.addmm_(inputs.T, inputs)


@dataclass
class LayerStatistics:
    """What a layer's objective needs: Σ x xᵀ or Σ x², and A_n [N, d_out, d_in] or Σ_n A_n² [d_out, d_in]."""

    inputs: Tensor
    gradients: Tensor | None
    samples: int

    def objective(self, weight: Tensor, lam: float) -> Quadratic | DiagonalQuadratic:
        """The layer's quadratic at its dense weight [d_out, d_in]."""
        gradients = self.gradients if lam < 1 else None
        if self.inputs.ndim == 1:
            return DiagonalQuadratic.build(weight, self.inputs, gradients, self.samples, lam)
        return Quadratic.build(weight, self.inputs, gradients, lam)


class Collector(AbstractContextManager):
    """Hooks on layers, removed on exit, whatever happens.

    Args:
        layers: to observe.
        diagonal: gather only the diagonals (Wanda): A_n is squared and added sample by sample, never stored.
        with_gradients: names of the layers whose gradients are wanted; the caller runs backward passes.
        samples: N, calibration samples in all.
        storage: where the accumulators live.
    """

    def __init__(
        self, layers: list[PrunableLayer], diagonal: bool, with_gradients: set[str], samples: int, storage: Storage
    ):
        self.layers, self.diagonal, self.samples, self.storage = layers, diagonal, samples, storage
        self.inputs: dict[str, InputStatistics] = {}
        self.by_tensor: dict[int, InputStatistics] = {}
        self.added: set[tuple[int, int]] = set()
        self.held: list[Tensor] = []
        self.gradients = {layer.name: self._gradient_buffer(layer) for layer in layers if layer.name in with_gradients}
        self.calls: dict[str, int] = {}
        self.sums: dict[str, Tensor] = {}
        self.mask: Tensor | None = None
        self.first, self.count = 0, 0
        self._hooks = ExitStack()

    def _gradient_buffer(self, layer: PrunableLayer) -> Tensor:
        shape = layer.shape if self.diagonal else (self.samples, *layer.shape)
        return self.storage.zeros(shape, torch.float32, f"{layer.name}: gradients")

    def __enter__(self) -> "Collector":
        for layer in self.layers:
            for module in layer.modules:
                handle = module.register_forward_hook(
                    lambda _, args, output, layer=layer: self._observe(layer, args[0].detach(), output)
                )
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.close()
        self._forget()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch: samples `first` to `first + count`, and the mask [B, T] of its tokens, None for all."""
        self.first, self.count, self.mask = first, count, mask
        self.calls.clear()

    def end(self) -> None:
        """Close a batch: check that layers which share a Gram matrix did read the same tensors."""
        for statistics in self.inputs.values():
            if len({tuple(read) for read in statistics.readers.values()}) > 1:
                raise MoonshotError(f"layers {sorted(statistics.readers)} read the same tensor in some batches only")
            for read in statistics.readers.values():
                read.clear()
        self._forget()

    def _forget(self) -> None:
        self.by_tensor.clear()
        self.added.clear()
        self.held.clear()

    def _observe(self, layer: PrunableLayer, inputs: Tensor, output: Tensor) -> None:
        mask = self._token_mask(layer.name, inputs)
        self._add_inputs(layer.name, inputs, mask)
        if layer.name not in self.gradients or not torch.is_grad_enabled():
            return
        self.calls[layer.name] = self.calls.get(layer.name, 0) + 1
        if not output.requires_grad:
            output.requires_grad_(True)
        output.register_hook(lambda delta: self._add_gradient(layer.name, inputs, delta, mask))

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

    def _add_inputs(self, name: str, inputs: Tensor, mask: Tensor | None) -> None:
        """Add to the layer's G, once per tensor: layers that read the same tensor share one G."""
        key = hash((inputs.data_ptr(), inputs.shape, inputs.stride()))
        if name not in self.inputs:
            self.inputs[name] = self.by_tensor.get(key) or self._input_buffer(name, inputs)
        mine = self.inputs[name]
        self.by_tensor.setdefault(key, mine)
        mine.readers.setdefault(name, []).append(key)
        if (id(mine), key) not in self.added:
            self.added.add((id(mine), key))
            self.held.append(inputs)  # while it lives, its address names it
            mine.add((inputs if mask is None else inputs[mask]).reshape(-1, inputs.shape[-1]))

    def _input_buffer(self, name: str, inputs: Tensor) -> InputStatistics:
        size = inputs.shape[-1]
        shape = (size,) if self.diagonal else (size, size)
        return InputStatistics(self.storage.zeros(shape, torch.float32, f"{name}: Gram matrix").to(inputs.device))

    def _add_gradient(self, name: str, inputs: Tensor, delta: Tensor, mask: Tensor | None) -> None:
        inputs, delta = self._per_sample(name, inputs), self._per_sample(name, delta)
        if mask is not None:
            delta = delta.masked_fill(~mask.reshape(delta.shape[:2])[..., None], 0)
        inputs, delta = inputs.float(), delta.float()
        self.calls[name] -= 1
        if self.diagonal:
            self._add_squares(name, inputs, delta)
            return
        out = self.gradients[name][self.first : self.first + self.count]
        if out.device == delta.device:
            out.baddbmm_(delta.mT, inputs)
        else:
            out += (delta.mT @ inputs).to(out.device)

    def _add_squares(self, name: str, inputs: Tensor, delta: Tensor) -> None:
        """Σ_n A_n²; A_n itself is the sum over the layer's calls, so a layer called twice waits for the last."""
        out = self.gradients[name]
        if self.calls[name] == 0 and name not in self.sums:
            for sample_delta, sample in zip(delta, inputs, strict=True):
                gradient = sample_delta.T @ sample
                out += gradient.square_().to(out.device)
            return
        total = delta.mT @ inputs
        total = total + self.sums.pop(name) if name in self.sums else total
        if self.calls[name]:
            self.sums[name] = total
        else:
            out += total.square_().sum(0).to(out.device)

    def _per_sample(self, name: str, tensor: Tensor) -> Tensor:
        """As [B, T, d]; a model may flatten its tokens to [B·T, d]."""
        if tensor.shape[0] == self.count:
            return tensor.reshape(self.count, -1, tensor.shape[-1])
        tokens = tensor.shape[:-1].numel()
        flattened = self.mask is not None and tokens == self.mask.numel()
        require(
            self.count == 1 or flattened,
            f"{name}: inputs of shape {list(tensor.shape)} do not show which of the batch's {self.count} samples they "
            "belong to: use batch_size=1",
        )
        return tensor.reshape(self.count, -1, tensor.shape[-1])

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
        diagonal = inputs if inputs.ndim == 1 else inputs.diagonal()
        _finite(diagonal, f"{name}: its inputs (activations)")
        if gradients is not None:
            _finite(gradients, f"{name}: its gradients")
        return LayerStatistics(inputs, gradients, self.samples)


def _finite(tensor: Tensor, what: str) -> None:
    require(
        all_finite(tensor),
        f"{what} hold NaN or infinite values: check the model's weights and dtype (float16 overflows; use bfloat16)",
    )
