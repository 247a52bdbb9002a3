"""LoRA on a pruned model: merging preserves both the zeros and the function.

A plain adapter adds B A to every weight: merging makes a pruned matrix dense, and masking it afterwards changes the
function. Here the adapter is masked from the start: with ``keep`` True where the pruned weight survives,

    y = W x + keep ⊙ (scaling · B A) dropout(x)

in training, inference and merging. The adapter's weights have PEFT's format, but without the mask they define another
model. So a mark replaces the type in saved adapters: PEFT alone raises an error; with this package imported, the
adapter is masked on loading.

Below an adapter the weight may be packed in memory, and a masked adapter can be merged into it. PEFT has no extension
point for the type of a base layer, or for the meaning of "all-linear", that works with any `LoraConfig`; so two of its
functions are replaced.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners import tuners_utils
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import Linear
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import VARIANT_KWARG_KEYS, ParamWrapper, _LoraParameterProxy, dispatch_default
from peft.tuners.tuners_utils import BaseTunerLayer, _maybe_include_all_linear_layers
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from ..errors import MoonshotError, error_context, require
from ..masks import dense_pruned, is_pruned
from ..model.layer_kinds import WEIGHT, find_layer
from ..runtime.packed_layers import PackedLinear
from ..runtime.packed_module import PackedModule

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
    """Create a masked adapter for a pruned layer; return None for any other layer, whose adapter PEFT creates.

    `target` is the layer, or its existing adapters. Options that fill the zeros raise `MoonshotError`.
    """
    base = _base(target)
    weight = getattr(base, kwargs.get("parameter_name") or WEIGHT, None)
    if not isinstance(weight, Tensor) or not is_pruned(weight):
        return None
    _check_start(config)
    module: Any = dispatch(target, adapter_name, config=config, **kwargs)
    _check(kwargs.get("target_name") or "a pruned layer", module)
    _mask(module)
    return module


def dispatch(target: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> nn.Module | None:
    """Like `dispatch_default` of PEFT, but also for packed layers."""
    if not isinstance(_base(target), PackedLinear):
        module: nn.Module | None = dispatch_default(target, adapter_name, config=config, **kwargs)
        return module
    with error_context(kwargs.get("target_name") or "a packed layer"):
        return PackedLoraLinear(target, adapter_name, config=config, **kwargs)


def include_all_linear(config: PeftConfig, model: nn.Module) -> PeftConfig:
    """Expand "all-linear" like PEFT, but include packed layers; called before any adapter is created.

    Raises:
        MoonshotError: an adapter on a parameter that is packed in memory, which PEFT would skip with a warning.
    """
    packed_weights = [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
        for weight in module.packed
    ]
    for target in getattr(config, "target_parameters", None) or ():
        on_packed = [name for name in packed_weights if f".{name}".endswith(f".{target}")]
        message = f"{next(iter(on_packed), target)} is packed in memory"
        hint = 'load the model with runtime="dense", or call model.dequantize() first'
        require(not on_packed, message, field="target_parameters", value=target, hint=hint)
    everything = str(getattr(config, "target_modules", "")).lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
    config = _maybe_include_all_linear_layers(config, model)
    if everything:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        wrapped = {name for name in packed if name.endswith(".base_layer")}
        vars(config)["target_modules"] |= {name for name in packed.keys() - wrapped if packed[name] is not head}
    return config


vars(tuners_utils)["_maybe_include_all_linear_layers"] = include_all_linear
vars(lora_model)["dispatch_default"] = dispatch


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
        model: from `get_peft_model` or `PeftModel.from_pretrained`; no adapter may be merged.

    Returns:
        The same model.

    Raises:
        MoonshotError: no adapter is on a pruned layer, one is merged, or merging one would fill zeros. The model is
            unchanged.
    """
    require(isinstance(model, PeftModel), f"model is a {type(model).__name__}: give what get_peft_model returns")
    for config in model.peft_config.values():
        _check_start(config)
    sparse = _adapters(model, [layer.parameter for layer in dense_pruned(model)])
    sparse += [
        (name, module)
        for name, module in _all_adapters(model)
        if isinstance(_base(module), PackedLinear) and is_pruned(_weight(module))
    ]
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
    """Return the PEFT adapters on the given weights, with their module names."""
    pruned = set(map(id, weights))
    return [(name, module) for name, module in _all_adapters(model) if id(_weight(module)) in pruned]


def _all_adapters(model: nn.Module) -> list[tuple[str, BaseTunerLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def _base(module: Any) -> nn.Module:
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base


def _mask(module: Any) -> None:
    module.__class__ = _MASKED.get(type(module), type(module))
    if not isinstance(module, PackedLoraLinear):
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
    with error_context(name):
        require(not module.merged, "an adapter is merged into its weight", hint="call unmerge_adapter() first")
        if isinstance(module, IA3Layer):
            return
        supported = type(module) in (*_MASKED, *_MASKED.values())
        kind = f"{type(module).__module__.split('.')[2]} {type(module).__name__}"
        require(supported, f"a PEFT {kind} adapter cannot keep the zeros of a pruned layer", hint=HINT)
        merges = getattr(_base(module), "bias", None) is not None or not any(module.lora_bias.values())
        message = "the layer has no bias, into which that of the adapter could be merged"
        require(merges, message, field="lora_bias", value=True, hint="set it to False")
        _check_variants(module)


def _check_start(config: PeftConfig) -> None:
    start = str(getattr(config, "init_lora_weights", ""))
    require(
        not start.lower().startswith(MOVING),
        "it moves a part of every weight into the adapter, which fills the zeros",
        field="init_lora_weights",
        value=start,
        hint='use True, "gaussian", "orthogonal" or "eva"',
    )


def _check_variants(module: Any) -> None:
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    require(not variants, f"{', '.join(sorted(variants))} fills the zeros of a pruned layer", hint=HINT)


class _Masked(nn.Module):
    """Mixin of the masked adapters."""

    keep: Tensor  # bool in the shape of the base weight, True where a weight survives
    lora_A: nn.ModuleDict

    def get_delta_weight(self, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = super()
        change: Tensor = base.get_delta_weight(*args, **kwargs)
        return change * self.keep

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        _check_start(config)
        base: Any = super()
        base.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        with error_context("a new adapter"):
            _check_variants(self)
        _mark(config)


class SparseParameter(_Masked, ParamWrapper):
    """Masked LoRA layer of PEFT on a parameter, such as fused experts [E, out, in] or [E, in, out]."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Like PEFT's method, but with the masked change: later releases add the factors' product without a mask."""
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


class PackedLoraLinear(Linear):
    """LoRA layer of PEFT on a packed weight [d_out, d_in]; it cannot be merged."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        _check_start(config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        _check_variants(self)
        self.fan_in_fan_out = False  # Conv1D, too, is packed as [d_out, d_in]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, PackedLinear)
        return module.in_features, module.out_features

    def base_unpacked(self) -> None:
        """Switch to the dense base weight; `to_runtime` and `dequantize` call this."""
        vars(self)["fan_in_fan_out"] = isinstance(self.get_base_layer(), Conv1D)
        self.__class__ = cast(Any, Linear)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        message = "an adapter without a mask would fill the zeros of the packed weight, or move it off its grid"
        raise MoonshotError(message, hint="call model.dequantize() first, or train with SparseLoraConfig")


class SparseLinear(_Masked, Linear):
    """Masked LoRA layer of PEFT on a Linear or GPT-2's Conv1D."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        single = kwargs.pop("adapter_names", None) is None
        require(single, "masked adapters do not support mixed batches", field="adapter_names")
        kwargs = {name: value for name, value in kwargs.items() if name not in VARIANT_KWARG_KEYS}
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                trained: Any = self.lora_A[adapter].weight
                inputs = self.lora_dropout[adapter](self._cast_input_dtype(x, trained.dtype))
                result = result + self._product(inputs, adapter)
        return result.to(dtype)

    def _product(self, inputs: Tensor, adapter: str) -> Tensor:
        layer, weight = find_layer(self.get_base_layer()), self.get_delta_weight(adapter)
        bias = self.lora_B[adapter].bias
        bias = None if bias is None else bias * self.scaling[adapter]
        return functional.linear(inputs, weight if layer is None else layer.as_matrix(weight), bias)


class SparsePackedLinear(SparseLinear, PackedLoraLinear):
    """Masked LoRA layer of PEFT on a packed weight; merging packs the weight again."""

    @property
    def keep(self) -> Tensor:  # type: ignore[override] # unpacked on every access
        return cast(Tensor, self.get_base_layer().weight) != 0

    def _product(self, inputs: Tensor, adapter: str) -> Tensor:
        """Recompute the dense matrix for gradients, so that it does not stay in memory."""
        product: Tensor = checkpoint(super()._product, inputs, adapter, use_reentrant=False, preserve_rng_state=False)
        return product

    def base_unpacked(self) -> None:
        super().base_unpacked()
        _mask(self)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self._change(Linear.merge, *args, **kwargs)

    def unmerge(self) -> None:
        self._change(Linear.unmerge)

    def _change(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Apply a method of PEFT to a dense copy of the base layer, and pack the result; on errors, change nothing."""
        base: Any = self.get_base_layer()
        dense: Any = nn.Linear(base.in_features, base.out_features, False, "meta")
        merged = [*self.merged_adapters]
        dense.weight = nn.Parameter(base.weight, requires_grad=False)
        dense.bias = None if base.bias is None else nn.Parameter(base.bias.detach().clone(), requires_grad=False)
        self.base_layer = dense
        try:
            method(self, *args, **kwargs)
            base.pack(dense.weight)
        except BaseException:
            self.merged_adapters = merged
            raise
        finally:
            self.base_layer = base
        if base.bias is not None:
            base.bias.data = dense.bias.data


_MASKED: dict[type, Any] = {
    Linear: SparseLinear,
    PackedLoraLinear: SparsePackedLinear,
    ParamWrapper: SparseParameter,
}
_CUSTOM_MODULES: Any = {nn.Module: masked_adapter}  # PEFT also accepts a function
