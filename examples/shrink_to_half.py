"""Shrink a model to half of its parameters, and distill it from the dense one. Any program runs the result.

Usage: python examples/shrink_to_half.py [OUTPUT] [MODEL]
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotPruner, perplexity


def main(
    output: str | Path = "outputs/half",
    model: str | Path = "HuggingFaceTB/SmolLM2-135M",
    calibration: Any = "c4",
    test: Any = "wikitext2",
    parameters: float = 0.5,
    **options: Any,
) -> None:
    """Print the decision and the perplexity before and after; the model is in `output`."""
    pruner = MoonshotPruner.from_pretrained(model, dtype="float32")
    before = perplexity(pruner.model, pruner.tokenizer, test).value
    report = pruner.shrink(calibration, parameters=parameters, recover="distill", **options)
    print(report.table())  # the chosen parts, and the alternatives
    pruner.save_pretrained(output)

    smaller = AutoModelForCausalLM.from_pretrained(output)  # an ordinary checkpoint
    after = perplexity(smaller, pruner.tokenizer, test).value
    print(f"{report.parameters[0]:,} → {report.parameters[1]:,} parameters, perplexity {before:.2f} → {after:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
