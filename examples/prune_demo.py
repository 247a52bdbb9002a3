"""Prune the small model in this folder to 2:4, save it, and reload it with plain transformers.

Usage: python examples/prune_demo.py [OUTPUT]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

DEMO = Path(__file__).parent / "demo_model"


def main(output: str = "outputs/prune_demo", num_samples: int = 128) -> tuple[float, float]:
    """Prune and save to `output`; returns the perplexity before and after."""
    config = MoonshotConfig(solver="sparsegpt", pattern="2:4", sequence_length=256, num_samples=num_samples)
    pruner = MoonshotPruner.from_pretrained(DEMO, config, dtype="auto")
    heldout = str(DEMO / "heldout.txt")
    before = perplexity(pruner.model, pruner.tokenizer, heldout, sequence_length=256).value

    report = pruner.prune(str(DEMO / "calibration.txt"))
    print(report.table())
    pruner.save_pretrained(output)

    # The checkpoint is an ordinary one with zeros: loading does not need this package.
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(output)
    after = perplexity(model, tokenizer, heldout, sequence_length=256).value
    print(f"perplexity: dense {before:.2f}, pruned {after:.2f}")
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:])
