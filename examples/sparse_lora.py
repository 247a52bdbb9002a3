"""Prune the small model in this folder to 2:4, adapt it with LoRA, and merge: it is 2:4 still.

Usage: python examples/sparse_lora.py [OUTPUT]
"""

import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from sparse_finetune import DEMO, LENGTH, heldout_perplexity, prune, show, training, windows
from transformers import Trainer

from optimum_moonshot import MoonshotCallback, MoonshotConfig
from optimum_moonshot.integrations.peft import sparse_lora


def main(
    output: str = "outputs/sparse_lora",
    model: str | Path = DEMO,
    pattern: str = "2:4",
    steps: int = 200,
    num_samples: int = 128,
    length: int = LENGTH,
) -> dict[str, tuple[float, float]]:
    """Prune, adapt, merge and save to `output`; returns {stage: (perplexity, sparsity)}."""
    config = MoonshotConfig(pattern=pattern, num_samples=num_samples, sequence_length=length)
    pruner, found = prune(model, config, length)
    data = windows(pruner.tokenizer, (DEMO / "calibration.txt").read_text(encoding="utf-8"), length)
    adapted = sparse_lora(get_peft_model(pruner.model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")))
    callback = MoonshotCallback()
    Trainer(adapted, training(output, steps, 2e-3), train_dataset=data, callbacks=[callback]).train()
    found["adapter"] = (heldout_perplexity(adapted, pruner.tokenizer, length), callback.masks.sparsity())

    pruner.model = adapted.merge_and_unload()  # adds to the surviving weights alone
    pruner.save_pretrained(output)
    callback.masks.check(config.parsed_pattern)
    found["merged"] = (heldout_perplexity(pruner.model, pruner.tokenizer, length), callback.masks.sparsity())
    show(found)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
