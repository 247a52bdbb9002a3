"""A tiny BERT without a head, alone or in a folder of sentence-transformers."""

import json

import torch
import transformers as hf
from models import TEXT, spread


def make(cls, config):
    torch.manual_seed(0)
    return spread(cls(config))


def bert():
    return make(hf.BertModel, hf.BertConfig(**TEXT))


def sentence_encoder(folder, tokenizer=None):
    """Loaded from a new folder, with normalized means as its embeddings."""
    bert().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return hf.AutoModel.from_pretrained(folder).eval()
