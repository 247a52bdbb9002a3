"""Quantize a pruned model to 4 bits, without losing its zeros, and save it packed.

Usage: python examples/quantize_pruned.py MODEL [OUTPUT]    (MODEL is the folder of a pruned model)
"""

import sys
from pathlib import Path
from typing import Any

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity, verify

CONFIG = MoonshotConfig(bits=4, lam=1)


def main(
    model: str | Path,
    output: str | Path = "outputs/int4",
    calibration: Any = "c4",
    test: Any = "wikitext2",
    config: MoonshotConfig = CONFIG,
) -> None:
    """Print perplexity and bytes before and after; the result is in `output`."""
    pruner = MoonshotPruner.from_pretrained(model, config, dtype="auto")
    before = perplexity(pruner.model, pruner.tokenizer, test).value
    report = pruner.prune(calibration)  # rounds the weights that are not zero
    after = perplexity(pruner.model, pruner.tokenizer, test).value
    pruner.save_pretrained(output, format="packed")
    print(f"sparsity {report.sparsity:.2f}, perplexity {before:.2f} → {after:.2f}")
    print(f"{size(model):,} → {size(output):,} bytes")
    print(verify(output).table())  # from the files: checksums, zeros, and the grid of 4 bits


def size(folder: str | Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
