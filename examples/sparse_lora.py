"""Prune the small model in this folder to 2:4, fine-tune it with LoRA, and merge: the result is still 2:4.

Usage: python examples/sparse_lora.py [OUTPUT]
"""

import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from sparse_finetune import DEMO, LENGTH, Results, heldout_perplexity, prune, show, training
from transformers import Trainer

from optimum_moonshot import MoonshotCallback, MoonshotConfig
from optimum_moonshot.integrations.peft import sparse_lora

CONFIG = MoonshotConfig(pattern="2:4", sequence_length=LENGTH)


def main(
    output: str = "outputs/sparse_lora", model: str | Path = DEMO, steps: int = 200, config: MoonshotConfig = CONFIG
) -> Results:
    """Prune, adapt, merge and save to `output`."""
    pruner, data, results = prune(model, config)
    adapted = sparse_lora(get_peft_model(pruner.model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")))
    callback, length = MoonshotCallback(), config.sequence_length
    Trainer(adapted, training(output, steps, 2e-3), train_dataset=data, callbacks=[callback]).train()
    results["adapter"] = heldout_perplexity(adapted, pruner.tokenizer, length), callback.masks.sparsity()

    pruner.model = adapted.merge_and_unload()  # changes only the surviving weights
    pruner.save_pretrained(output)
    callback.masks.check(config.parsed_pattern)
    results["merged"] = heldout_perplexity(pruner.model, pruner.tokenizer, length), callback.masks.sparsity()
    show(results)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
