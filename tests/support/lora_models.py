"""Models with LoRA adapters."""

import pytest
import torch
from masked_models import loss_of
from models import token_batches

peft = pytest.importorskip("peft")


def lora(model, **changes):
    settings = dict(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **changes}))


def logits(model):
    with torch.no_grad():
        return model.eval()(**token_batches()[0]).logits


def train(model, steps=4):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in token_batches(2 * steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
