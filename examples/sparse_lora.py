"""Prune a model to 2:4, fine-tune it with LoRA, and merge the adapter: the result is still 2:4.

Usage: python examples/sparse_lora.py [OUTPUT] [MODEL]
"""

import sys
from pathlib import Path

from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotPruner
from optimum_moonshot.integrations.peft import sparse_lora

CONFIG = MoonshotConfig(pattern="2:4", sequence_length=256)


def main(
    output: str | Path = "outputs/lora",
    model: str | Path = "HuggingFaceTB/SmolLM2-135M",
    data: Dataset | None = None,
    config: MoonshotConfig = CONFIG,
    steps: int = 200,
) -> list[float]:
    """Return the training losses that the Trainer logged; the merged model is in `output`."""
    data = data or load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")
    pruner = MoonshotPruner.from_pretrained(model, config, dtype="float32")
    pruner.prune(data)

    tokenizer, length = pruner.tokenizer, config.sequence_length
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = data.filter(lambda row: row["text"].strip())
    samples = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=length), remove_columns=["text"])
    adapted = sparse_lora(get_peft_model(pruner.model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")))
    sizes = dict(max_steps=steps, per_device_train_batch_size=4, learning_rate=2e-3, logging_steps=max(1, steps // 10))
    arguments = TrainingArguments(str(output), save_strategy="no", report_to=[], **sizes)
    collator, callback = DataCollatorForLanguageModeling(tokenizer, mlm=False), MoonshotCallback()
    trainer = Trainer(adapted, arguments, train_dataset=samples, data_collator=collator, callbacks=[callback])
    trainer.train()

    pruner.model = adapted.merge_and_unload()  # changes only the remaining weights
    pruner.save_pretrained(output)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(*sys.argv[1:])
