"""Prune a model to 2:4, measure it, and publish it on the Hub with a model card.

Usage: python examples/prune_and_push.py USER/NAME [MODEL]    (after `hf auth login`)
"""

import sys
from pathlib import Path
from typing import Any

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

CONFIG = MoonshotConfig.recipe("2:4", "fast")


def main(
    repository: str,
    model: str | Path = "HuggingFaceTB/SmolLM2-135M",
    calibration: Any = "c4",
    test: Any = "wikitext2",
    config: MoonshotConfig = CONFIG,
    **options: Any,
) -> str:
    """Return the address of the commit; `options` are those of `push_to_hub`, such as a token."""
    pruner = MoonshotPruner.from_pretrained(model, config, dtype="auto")
    dense = perplexity(pruner.model, pruner.tokenizer, test)
    report = pruner.prune(calibration)
    report.record(perplexity(pruner.model, pruner.tokenizer, test), dense=dense)  # for the model card
    address = pruner.push_to_hub(repository, format="packed", **{"private": True, **options})
    print(f"published {address}")
    return address


if __name__ == "__main__":
    main(*sys.argv[1:])
