"""Prune a model while loading it with `from_pretrained`.

Usage: python examples/prune_on_load.py [OUTPUT]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotConfig, convert  # the import registers MoonshotConfig with transformers

DEMO = Path(__file__).parent / "demo_model"


def main(output: str = "outputs/prune_on_load", num_samples: int = 128):
    """Return the pruned model, after saving it dense to `output` and packed to `output`-packed."""
    config = MoonshotConfig(
        pattern="2:4",
        num_samples=num_samples,
        sequence_length=256,
        calibration=str(DEMO / "calibration.txt"),  # tokenized with the model's tokenizer
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO, quantization_config=config, dtype="auto")
    print(model.moonshot_report.table())

    # It is an ordinary transformers model.
    model.save_pretrained(output)
    convert(output, f"{output}-packed", "packed")
    for folder in (output, f"{output}-packed"):
        print(f"{next(Path(folder).glob('*.safetensors')).stat().st_size:>10,} bytes in {folder}")
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
