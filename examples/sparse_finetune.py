"""Prune the small model in this folder, then train its surviving weights with `transformers.Trainer`.

Usage: python examples/sparse_finetune.py [OUTPUT]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotPruner, perplexity

DEMO = Path(__file__).parent / "demo_model"
LENGTH = 256
CONFIG = MoonshotConfig(sparsity=0.7, sequence_length=LENGTH)
Results = dict[str, tuple[float, float]]  # stage → perplexity, sparsity


def windows(tokenizer, text: str, length: int) -> list[dict]:
    """A text as training samples of `length` tokens, with the tokens as labels."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)]


def main(
    output: str = "outputs/sparse_finetune", model: str | Path = DEMO, steps: int = 200, config: MoonshotConfig = CONFIG
) -> Results:
    """Prune, train and save to `output`."""
    pruner, data, results = prune(model, config)
    callback = MoonshotCallback()  # keeps the zeros, and verifies them at the end
    Trainer(pruner.model, training(output, steps), train_dataset=data, callbacks=[callback]).train()
    pruner.save_pretrained(output)

    # The checkpoint is an ordinary one with zeros: loading does not need this package.
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    results["recovered"] = (heldout_perplexity(loaded, tokenizer, config.sequence_length), callback.masks.sparsity())
    show(results)
    return results


def prune(model: str | Path, config: MoonshotConfig) -> tuple[MoonshotPruner, list[dict], Results]:
    """The pruner with its pruned model, training data, and results so far."""
    text, length = DEMO / "calibration.txt", config.sequence_length
    pruner = MoonshotPruner.from_pretrained(model, config, dtype=torch.float32)
    data = windows(pruner.tokenizer, text.read_text(encoding="utf-8"), length)
    results = {"dense": (heldout_perplexity(pruner.model, pruner.tokenizer, length), 0.0)}
    report = pruner.prune(str(text))
    results["pruned"] = (heldout_perplexity(pruner.model, pruner.tokenizer, length), report.sparsity)
    return pruner, data, results


def training(output: str, steps: int, learning_rate: float = 5e-4) -> TrainingArguments:
    """Arguments of a short run with four windows per step."""
    return TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to=[],
    )


def heldout_perplexity(model, tokenizer, length: int) -> float:
    """Perplexity on text that is not in the training data."""
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=length).value


def show(results: Results) -> None:
    """Print a table of perplexities and sparsities."""
    print(f"{'model':<9}  perplexity  sparsity")
    for name, (value, sparsity) in results.items():
        print(f"{name:<9}  {value:10.2f}  {sparsity:8.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
