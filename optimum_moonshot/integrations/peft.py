"""LoRA on a pruned model: merging preserves both the zeros and the function.

A plain adapter adds B A to every weight: merging makes a pruned matrix dense, and masking it afterwards changes the
function. Here the adapter is masked from the start: with ``keep`` True where the pruned weight survives,

    y = W x + keep ⊙ (scaling · B A) dropout(x)

in training, inference and merging. The adapter's weights have PEFT's format, but without the mask they define another
model. So a mark replaces the type in saved adapters: PEFT alone raises an error; with this package imported, it masks
the adapter on loading.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS, ParamWrapper, _LoraParameterProxy, dispatch_default
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from ..errors import naming, require
from ..masks import find_pruned, is_pruned
from ..model.layer_kinds import WEIGHT, find_layer

HINT = "use a LoraConfig without such options on pruned layers, or leave them out of target_modules"
# Initializations that change the base weight.
MOVING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# `peft_type` in the files: PEFT prints it in its error if this package is not imported.
MARK = "MOONSHOT_LORA (masked for a pruned model: import optimum_moonshot before loading it)"


@dataclass
class SparseLoraConfig(LoraConfig):
    """A `LoraConfig` that masks adapters on pruned layers when PEFT creates them.

    Pass it to `get_peft_model`, or to a trainer that calls it (TRL's `peft_config=`). `sparse_lora` converts the
    configurations of existing adapters.

    Raises:
        MoonshotError: (in PEFT) options that fill the zeros of a pruned layer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module(_CUSTOM_MODULES)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "peft_type": MARK}


PEFT_TYPE_TO_CONFIG_MAPPING[cast(PeftType, MARK)] = SparseLoraConfig  # for loading adapters with the mark


def masked_adapter(target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> nn.Module | None:
    """Create a masked adapter for a pruned layer; None for other layers, for which PEFT creates its own.

    `target` is the layer, or its existing adapters. `MoonshotError` refuses options that fill the zeros.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    weight = getattr(base, kwargs.get("parameter_name") or WEIGHT, None)
    if not isinstance(weight, Tensor) or not is_pruned(weight):
        return None
    _check_start(config)
    module: Any = dispatch_default(target, adapter_name, config=config, **kwargs)
    _check(kwargs.get("target_name") or "a pruned layer", module)
    _mask(module)
    return module


def sparse_lora(model: PeftModel) -> PeftModel:
    """Mask the adapters on a PEFT model's pruned layers, in place.

    ```python
    model = sparse_lora(get_peft_model(pruned, LoraConfig(target_modules="all-linear")))
    ...                                              # train
    model.save_pretrained("adapter")                 # or, with the same 2:4 pattern:
    model.merge_and_unload().save_pretrained("merged")

    model = PeftModel.from_pretrained(pruned, "adapter")  # masked; an error without this package
    ```

    Call it again after adding adapters to further layers. IA3 only scales, which preserves zeros. Pruned layers in
    `modules_to_save` are trained directly: use `keep_sparsity` or `MoonshotCallback` for them.

    Args:
        model: of `get_peft_model` or `PeftModel.from_pretrained`; no adapter may be merged.

    Returns:
        The same model.

    Raises:
        MoonshotError: no adapter is on a pruned layer, one is merged, or merging one would fill zeros. The model is
            unchanged.
    """
    require(isinstance(model, PeftModel), f"model is a {type(model).__name__}: give what get_peft_model returns")
    for config in model.peft_config.values():
        _check_start(config)
    sparse = _adapters(model, [layer.parameter for layer in find_pruned(model)])
    require(bool(sparse), "no adapter is on a pruned layer: nothing to mask")
    for name, module in sparse:
        _check(name, module)
    for _, module in sparse:
        if type(module) in _MASKED:
            _mask(module)
    marked = {name for _, module in sparse if isinstance(module, _Masked) for name in module.lora_A}
    for name in marked & model.peft_config.keys():
        _mark(model.peft_config[name])
    return model


def unmasked_adapters(model: nn.Module, weights: Iterable[nn.Parameter]) -> list[str]:
    """Return the layers whose adapters would fill zeros of the pruned weights when merged."""
    preserving = (IA3Layer, _Masked)
    return [name for name, module in _adapters(model, weights) if not isinstance(module, preserving)]


def _adapters(model: nn.Module, weights: Iterable[nn.Parameter]) -> list[tuple[str, BaseTunerLayer]]:
    """The adapters of PEFT on some weights, by their names."""
    pruned = set(map(id, weights))
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    return [(name, module) for name, module in layers if id(_weight(module)) in pruned]


def _mask(module: Any) -> None:
    module.__class__ = _MASKED.get(type(module), type(module))
    module.register_buffer("keep", _weight(module).detach() != 0, persistent=False)


def _mark(config: PeftConfig) -> None:
    """Convert a configuration in place to one that is saved with the mark: PEFT and the caller share the object."""
    if type(config) is LoraConfig:
        config.__class__ = SparseLoraConfig
        config._register_custom_module(_CUSTOM_MODULES)


def _weight(module: BaseTunerLayer) -> Any:
    """Return the base weight of an adapter: a module's weight, or the named parameter, such as fused experts."""
    return getattr(module.get_base_layer(), getattr(module, "parameter_name", WEIGHT), None)


def _check(name: str, module: Any) -> None:
    with naming(name):
        require(not module.merged, "an adapter is merged into its weight", hint="call unmerge_adapter() first")
        if isinstance(module, IA3Layer):
            return
        supported = type(module) in (*_MASKED, *_MASKED.values())
        kind = f"{type(module).__module__.split('.')[2]} {type(module).__name__}"
        require(supported, f"a PEFT {kind} adapter cannot keep the zeros of a pruned layer", hint=HINT)
        _check_variants(module)


def _check_start(config: PeftConfig) -> None:
    start = str(getattr(config, "init_lora_weights", ""))
    require(
        not start.lower().startswith(MOVING),
        "it moves a part of every weight into the adapter and fills the zeros",
        field="init_lora_weights",
        value=start,
        hint='use True, "gaussian", "orthogonal" or "eva"',
    )


def _check_variants(module: Any) -> None:
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    require(not variants, f"{', '.join(sorted(variants))} fills the zeros of a pruned layer", hint=HINT)


class _Masked(nn.Module):
    """Mixin of the masked adapters."""

    keep: Tensor  # bool, True where the weight survives, in the shape of the weight
    lora_A: nn.ModuleDict

    def get_delta_weight(self, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = super()
        change: Tensor = base.get_delta_weight(*args, **kwargs)
        return change * self.keep

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        _check_start(config)
        base: Any = super()
        base.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        with naming("a new adapter"):
            _check_variants(self)
        _mark(config)


class SparseParameter(_Masked, ParamWrapper):
    """PEFT's LoRA on a parameter, with a mask: on fused experts [E, out, in] or [E, in, out]."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """As in PEFT, but with the masked change: later releases add the product of the factors, without a mask."""
        deltas = [self.get_delta_weight(adapter) for adapter in active_adapters if adapter in self.lora_A]
        if not deltas:
            yield
            return
        base: Any = self.get_base_layer()
        name, trained = self.parameter_name, self.get_param().requires_grad
        parametrize.register_parametrization(base, name, _LoraParameterProxy(sum(deltas[1:], start=deltas[0])))
        base.parametrizations[name].original.requires_grad_(trained)
        try:
            with parametrize.cached():
                yield
        finally:
            self._remove_parametrizations()


SparseParameter.__name__ = ParamWrapper.__name__  # PEFT checks this name before it wraps a further parameter


class SparseLinear(_Masked, Linear):
    """PEFT's LoRA layer with a mask, on a Linear or GPT-2's Conv1D."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        single = kwargs.pop("adapter_names", None) is None
        require(single, "masked adapters do not support mixed batches", field="adapter_names")
        kwargs = {name: value for name, value in kwargs.items() if name not in VARIANT_KWARG_KEYS}
        result = self.base_layer(x, *args, **kwargs)
        dtype, layer = result.dtype, find_layer(self.get_base_layer())
        assert layer is not None  # PEFT wraps a Linear or a Conv1D
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                weight = layer.as_matrix(self.get_delta_weight(adapter))
                inputs = self.lora_dropout[adapter](self._cast_input_dtype(x, weight.dtype))
                bias = self.lora_B[adapter].bias
                bias = None if bias is None else bias * self.scaling[adapter]
                result = result + functional.linear(inputs, weight, bias)
        return result.to(dtype)


_MASKED: dict[type, Any] = {Linear: SparseLinear, ParamWrapper: SparseParameter}
_CUSTOM_MODULES: Any = {nn.Module: masked_adapter}  # PEFT also accepts a function
