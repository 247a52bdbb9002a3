"""Calibration data for tests: a byte tokenizer, texts of fixed lengths, files, and the samples read from them."""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from optimum_moonshot.data.text import CalibrationData, load_calibration

TEXT = " ".join(str(number) for number in range(1000))  # every window of it occurs once
LONG = [f"{i}: " + "abcdefghij" * (3 + i) for i in range(12)]  # 33 tokens and more
SHORT = ["x" * (i + 2) for i in range(9)]  # 2 to 10 tokens


def byte_tokenizer(max_length: int = 64, **special: str) -> PreTrainedTokenizerFast:
    """One token per byte; every text begins and ends with `bos_token`, if given."""
    symbols = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A {bos}", special_tokens=[(bos, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)


TOKENIZER = byte_tokenizer()


def load(source, num_samples: int = 9, sequence_length: int = 32, **options) -> CalibrationData:
    return load_calibration(source, TOKENIZER, num_samples=num_samples, sequence_length=sequence_length, **options)


def inputs(items, num_samples: int, **options) -> CalibrationData:
    return load_calibration(items, None, num_samples=num_samples, **options)


def ids(data: CalibrationData) -> list:
    return [batch["input_ids"].tolist() for batch in data.batches]


def strings(data: CalibrationData, tokenizer=TOKENIZER) -> list[str]:
    """The samples as text, without padding."""
    texts = []
    for batch in data.batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        texts += [tokenizer.decode(row[mask.bool()]) for row, mask in zip(batch["input_ids"], masks, strict=True)]
    return texts


def same(a: CalibrationData, b: CalibrationData) -> bool:
    pairs = zip(a.batches, b.batches, strict=True)
    return a.digest == b.digest and all(torch.equal(x[key], y[key]) for x, y in pairs for key in x)


def write(path: Path, content: str | bytes | list) -> Path:
    """Writes text or bytes unchanged, and records in the format of the file's suffix."""
    if isinstance(content, list) and path.suffix == ".parquet":
        Dataset.from_list(content).to_parquet(path)
        return path
    if isinstance(content, list):
        array = ".jsonl" not in path.name.lower()
        content = json.dumps(content) if array else "\n".join(json.dumps(record) for record in content)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and content else content)
    return path


def to_tensor(image) -> torch.Tensor:
    """A processor in plain torch: [3, height, width] in [0, 1]."""
    return torch.tensor(np.array(image)).permute(2, 0, 1).float() / 255
