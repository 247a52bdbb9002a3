"""LoRA on a pruned model, whose merge keeps both the zeros and the function.

A plain adapter adds B A to every weight: merged, a pruned matrix is dense again, and masked after the merge it computes
something else. Here the adapter is masked from the start: with ``keep`` True where the pruned weight survives,

    y = W x + keep ⊙ (scaling · B A) dropout(x)

in training, in use and in the merge alike. The adapter's weights are ordinary ones of PEFT's, but mean another model
without the mask. So what is saved has a mark in the place of its type: PEFT alone stops there, and with this package
imported it masks the adapter again while it loads.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS, ParamWrapper, _LoraParameterProxy, dispatch_default
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from ..errors import require
from ..masks import find_pruned, is_pruned
from ..model.layer_adapters import find_adapter
from ..model.layers import WEIGHT

MEND = "use a LoraConfig without such options on pruned layers, or leave them out of target_modules"
# Ways to start an adapter that change the weight under it.
MOVING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# `peft_type` in the files, for good: PEFT's error repeats it where this package is not imported.
MARK = "MOONSHOT_LORA (masked for a pruned model: import optimum_moonshot before loading it)"


@dataclass
class SparseLoraConfig(LoraConfig):
    """A `LoraConfig` whose adapters on pruned layers are masked as soon as PEFT makes them.

    `sparse_lora` makes those of a model's adapters such ones. Given to `get_peft_model`, or to a trainer that calls it
    (TRL's `peft_config=`), nothing else is needed.

    Raises:
        MoonshotError: (when PEFT uses it) options that fill the zeros of a pruned layer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module({nn.Module: masked_adapter})

    def to_dict(self) -> dict[str, Any]:
        """As PEFT's, with the mark."""
        return {**super().to_dict(), "peft_type": MARK}


PEFT_TYPE_TO_CONFIG_MAPPING[MARK] = SparseLoraConfig  # what adapters with the mark are


def masked_adapter(target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> nn.Module | None:
    """The layer that PEFT shall put around another: a masked one on a pruned layer, elsewhere None, which is its own.

    Args:
        target: the layer, or the adapters that lie around it already.
        adapter_name: of the new one.
        config: of the new one.
        kwargs: further options of PEFT's.

    Raises:
        MoonshotError: options that fill the zeros.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    weight = getattr(base, kwargs.get("parameter_name") or WEIGHT, None)
    if not isinstance(weight, Tensor) or not is_pruned(weight):
        return None
    _check_start(config)
    module = dispatch_default(target, adapter_name, config=config, **kwargs)
    _check(kwargs.get("target_name") or "a pruned layer", module)
    _mask(module)
    return module


def sparse_lora(model: PeftModel) -> PeftModel:
    """Mask the adapters on a PEFT model's pruned layers, in place.

    ```python
    model = sparse_lora(get_peft_model(pruned, LoraConfig(target_modules="all-linear")))
    ...                                              # train
    model.save_pretrained("adapter")                 # or, 2:4 as before:
    model.merge_and_unload().save_pretrained("merged")

    model = PeftModel.from_pretrained(pruned, "adapter")  # masked again; without this package it is an error
    ```

    Call it again when adapters were added on further layers. IA3 only scales and keeps zeros as it is. Pruned layers in
    `modules_to_save` train as a whole: `keep_sparsity` or `MoonshotCallback` keeps theirs.

    Args:
        model: of `get_peft_model` or `PeftModel.from_pretrained`; no adapter may be merged.

    Returns:
        The same model.

    Raises:
        MoonshotError: nothing is pruned under the adapters, one is merged, or one is of a kind whose merge fills zeros.
            The model is as it was.
    """
    require(isinstance(model, PeftModel), f"model is a {type(model).__name__}: give what get_peft_model returns")
    for config in model.peft_config.values():
        _check_start(config)
    pruned = {id(layer.parameter) for layer in find_pruned(model)}
    adapters = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    touched = [(name, module) for name, module in adapters if id(_weight(module)) in pruned]
    require(bool(touched), "no adapter lies on a pruned layer: nothing needs masking")
    for name, module in touched:
        _check(name, module)
    for _, module in touched:
        if type(module) in _MASKED:
            _mask(module)
    used = {name for _, module in touched if isinstance(module, _Masked) for name in module.lora_A}
    for name in used & model.peft_config.keys():
        _mark(model.peft_config[name])
    return model


def unmasked_adapters(model: nn.Module, weights: Collection[nn.Parameter]) -> list[str]:
    """The layers of a model whose adapters, merged, would fill zeros.

    Args:
        model: with adapters of PEFT's.
        weights: the pruned ones.
    """
    pruned = set(map(id, weights))
    adapters = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    keeping = (IA3Layer, _Masked)
    return [name for name, module in adapters if id(_weight(module)) in pruned and not isinstance(module, keeping)]


def _mask(module: Linear | ParamWrapper) -> None:
    module.__class__ = _MASKED.get(type(module), type(module))
    module.register_buffer("keep", _weight(module).detach() != 0, persistent=False)


def _mark(config: LoraConfig) -> None:
    """Make a configuration one that is saved with the mark, in place: PEFT and the caller hold the same object."""
    if type(config) is LoraConfig:
        config.__class__ = SparseLoraConfig
        config._register_custom_module({nn.Module: masked_adapter})


def _weight(module: BaseTunerLayer) -> Any:
    """What an adapter lies on: a module's weight, or the parameter that it names, such as fused experts."""
    return getattr(module.get_base_layer(), getattr(module, "parameter_name", WEIGHT), None)


def _check(name: str, module: BaseTunerLayer) -> None:
    require(not module.merged, f"{name}: an adapter is merged into its weight; call unmerge_adapter() first")
    if isinstance(module, IA3Layer):
        return
    known = type(module) in (*_MASKED, *_MASKED.values())
    kind = f"{type(module).__module__.split('.')[2]} {type(module).__name__}"
    require(known, f"{name}: the zeros of a pruned layer cannot be kept under a PEFT {kind} adapter; {MEND}")
    _check_variants(name, module)


def _check_start(config: PeftConfig) -> None:
    start = str(getattr(config, "init_lora_weights", ""))
    require(
        not start.lower().startswith(MOVING),
        f"init_lora_weights={start!r} moves a part of every weight into the adapter and fills the zeros: "
        'use True, "gaussian", "orthogonal" or "eva"',
    )


def _check_variants(name: str, module: Any) -> None:
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    require(not variants, f"{name}: {', '.join(sorted(variants))} mixes the zeros of a pruned layer back in; {MEND}")


class _Masked(nn.Module):
    """What the masked layers have in common.

    Attributes:
        keep: True where the weight survives, bool, laid out as the weight.
    """

    keep: Tensor

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> Tensor:
        """The change of the weight by one adapter, laid out as the weight."""
        return super().get_delta_weight(adapter, *args, **kwargs) * self.keep

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        _check_start(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        _check_variants("a new adapter", self)
        _mark(config)


class SparseParameter(_Masked, ParamWrapper):
    """PEFT's LoRA on a parameter, with a mask: on fused experts [E, out, in] or [E, in, out]."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """As PEFT's, by the change itself: what later releases add is a product of its factors, which has no mask."""
        deltas = [self.get_delta_weight(adapter) for adapter in active_adapters if adapter in self.lora_A]
        if not deltas:
            yield
            return
        base, name, trained = self.get_base_layer(), self.parameter_name, self.get_param().requires_grad
        parametrize.register_parametrization(base, name, _LoraParameterProxy(sum(deltas[1:], start=deltas[0])))
        base.parametrizations[name].original.requires_grad_(trained)
        try:
            with parametrize.cached():
                yield
        finally:
            self._remove_parametrizations()


SparseParameter.__name__ = ParamWrapper.__name__  # by which PEFT knows that another parameter can be wrapped too


class SparseLinear(_Masked, Linear):
    """PEFT's LoRA layer with a mask, on a Linear or GPT-2's Conv1D."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        require(kwargs.pop("adapter_names", None) is None, "adapter_names: masked adapters serve one batch at a time")
        kwargs = {name: value for name, value in kwargs.items() if name not in VARIANT_KWARG_KEYS}
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                result = result + self._delta(adapter, x)
        return result.to(dtype)

    def _delta(self, adapter: str, x: Tensor) -> Tensor:
        weight = find_adapter(self.get_base_layer()).as_matrix(self.get_delta_weight(adapter))
        x = self.lora_dropout[adapter](self._cast_input_dtype(x, weight.dtype))
        bias = self.lora_B[adapter].bias
        return functional.linear(x, weight, None if bias is None else bias * self.scaling[adapter])


_MASKED: dict[type[nn.Module], type[_Masked]] = {Linear: SparseLinear, ParamWrapper: SparseParameter}
