"""Prune a model, then fine-tune the remaining weights with `transformers.Trainer`. Zeros stay zero.

Usage: python examples/sparse_finetune.py [OUTPUT] [MODEL]
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotPruner, perplexity

CONFIG = MoonshotConfig(sparsity=0.5, sequence_length=256)


def main(
    output: str | Path = "outputs/finetuned",
    model: str | Path = "HuggingFaceTB/SmolLM2-135M",
    data: Dataset | None = None,
    config: MoonshotConfig = CONFIG,
    steps: int = 200,
) -> list[float]:
    """Return the perplexities of the dense, the pruned and the trained model, of which the last is in `output`."""
    data = data or load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")
    train, test = (data.select(half) for half in (range(0, len(data), 2), range(1, len(data), 2)))
    pruner = MoonshotPruner.from_pretrained(model, config, dtype="float32")
    length = config.sequence_length

    def measure(model: torch.nn.Module) -> float:
        return perplexity(model, pruner.tokenizer, test, sequence_length=length, max_windows=50).value

    values = [measure(pruner.model)]
    pruner.prune(train)
    values.append(measure(pruner.model))

    ids = torch.tensor(pruner.tokenizer("\n\n".join(train["text"]))["input_ids"])
    windows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)]
    sizes = dict(max_steps=steps, per_device_train_batch_size=4, learning_rate=2e-4, lr_scheduler_type="cosine")
    arguments = TrainingArguments(str(output), save_strategy="no", report_to=[], **sizes)
    callback = MoonshotCallback()  # keeps the zeros, and verifies them at the end
    Trainer(pruner.model, arguments, train_dataset=windows, callbacks=[callback]).train()
    pruner.save_pretrained(output)

    values.append(measure(AutoModelForCausalLM.from_pretrained(output)))  # an ordinary checkpoint with zeros
    print("perplexity: dense {:.2f}, pruned {:.2f}, fine-tuned {:.2f}".format(*values))
    return values


if __name__ == "__main__":
    main(*sys.argv[1:])
