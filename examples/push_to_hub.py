"""Prune the small model in this folder, evaluate it, and publish it on the Hub with a model card.

Usage: python examples/push_to_hub.py USER/NAME    (after `hf auth login`)
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.evaluation.metrics import Perplexity

DEMO = Path(__file__).parent / "demo_model"


def main(repo_id: str, num_samples: int = 128, **options: Any) -> str:
    """Return the URL of the commit; `options` are those of `push_to_hub`, such as a token."""
    config = MoonshotConfig(pattern="2:4", sequence_length=256, num_samples=num_samples)
    pruner = MoonshotPruner.from_pretrained(DEMO, config, dtype="auto")

    def measure() -> Perplexity:
        return perplexity(pruner.model, pruner.tokenizer, str(DEMO / "heldout.txt"), sequence_length=256)

    before = measure()
    report = pruner.prune(str(DEMO / "calibration.txt"))
    report.record(measure(), dense=before)

    address = pruner.push_to_hub(repo_id, format="packed", **{"private": True, **options})
    print(f"published {address}")
    AutoModelForCausalLM.from_pretrained(repo_id, dtype="auto", token=options.get("token"))
    return address


if __name__ == "__main__":
    main(sys.argv[1])
