"""The `quantization_config` of pruned checkpoints in transformers."""

from typing import Any, cast

from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from ..errors import check_choice, require
from ..packing import INPUTS
from .weight_files import METHOD, check_config_entry, config_entry

RUNTIMES = ("dense", "packed", "auto")


class MoonshotPrunedCheckpoint(QuantizationConfigMixin):
    """The runtime of the layers of a pruned checkpoint, as `quantization_config` of `from_pretrained`.

    ```python
    config = MoonshotPrunedCheckpoint(runtime="auto")
    model = AutoModelForCausalLM.from_pretrained("Llama-3.2-1B-2of4-packed", quantization_config=config)
    ```

    transformers also builds it from the entry in config.json of a packed checkpoint, and names it in its error for a
    `MoonshotConfig` that is passed for an already pruned model. A model with packed layers has it as
    `model.config.quantization_config`.

    Args:
        runtime: "dense", "packed" or "auto"; see `load_pruned`.
        dequantize: True for runtime="dense", as transformers names it in other configurations.
        inputs: "int8" or "float"; see `load_pruned`.

    Raises:
        MoonshotError: another runtime, other inputs, or `dequantize` with a runtime other than "dense".
    """

    quant_method = cast(QuantizationMethod, METHOD)

    def __init__(self, runtime: str = "dense", dequantize: bool = False, inputs: str = INPUTS[0]):
        check_choice("runtime", runtime, RUNTIMES)
        check_choice("inputs", inputs, INPUTS)
        contradiction = dequantize and runtime != "dense"
        require(not contradiction, f"it contradicts runtime={runtime!r}", field="dequantize", value=dequantize)
        self.runtime, self.dequantize, self.inputs = runtime, dequantize, inputs

    @classmethod
    def from_dict(cls, config_dict: Any, *args: Any, **kwargs: Any) -> "MoonshotPrunedCheckpoint":
        """Read the entry in config.json; the runtime is the caller's choice, other arguments are ignored."""
        check_config_entry(config_dict)
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return config_entry()

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return the attributes that transformers copies to the configuration of config.json."""
        return {"runtime": self.runtime, "dequantize": self.dequantize, "inputs": self.inputs}
