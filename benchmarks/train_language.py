"""Train the other language models of the benchmarks, of other families than the one in examples/.

    python benchmarks/train_language.py opt TEXT FOLDER        # about 2 hours on one core; benchmarks/opt_model
    python benchmarks/train_language.py mixture TEXT FOLDER    # about 1 hour; benchmarks/mixture_model

"opt" has LayerNorm, biases, learned positions, ReLU and tied embeddings; "mixture" is a small Qwen3-MoE: 16 experts in
each of 4 decoder layers, 4 per token. TEXT is a plain text file; the tokenizer is the shipped model's. FOLDER gets
the model in bfloat16, and a checkpoint every 100 steps, from which training resumes.
"""

import math
import time
from pathlib import Path

import torch
from common import parser
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

MODEL = Path(__file__).parents[1] / "examples" / "demo_model"
LENGTH, BATCH, RATE = 256, 16, 2e-3


def opt(vocabulary: int, special: dict[str, int]) -> PreTrainedConfig:
    return OPTConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        dropout=0.0,
        **special,
    )


def mixture(vocabulary: int, special: dict[str, int]) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,  # weight of the load-balancing loss
        tie_word_embeddings=True,
        **special,
    )


FAMILIES = {"opt": opt, "mixture": mixture}


def make_model(family: str, tokenizer) -> PreTrainedModel:
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return AutoModelForCausalLM.from_config(FAMILIES[family](len(tokenizer), special), dtype=torch.float32)


def rate(step: int, steps: int) -> float:
    return RATE * min(1, (step + 1) / 100) * (0.5 * (1 + math.cos(math.pi * step / steps)) * 0.95 + 0.05)


def batch(ids: torch.Tensor, step: int) -> torch.Tensor:
    """Windows at positions determined by the step alone, so that resumed training draws the same ones."""
    starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([ids[i : i + LENGTH + 1] for i in starts])


def loss_of(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy plus the auxiliary loss of the family."""
    routed = hasattr(model.config, "router_aux_loss_coef")
    output = model(windows[:, :-1], **({"output_router_logits": True} if routed else {}))
    loss = cross_entropy(output.logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss + model.config.router_aux_loss_coef * output.aux_loss if routed else loss


def train(model: PreTrainedModel, ids: torch.Tensor, steps: int, kept: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    first = 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    started = time.perf_counter()
    for step in range(first, steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps)
        windows = batch(ids, step)
        loss = loss_of(model, windows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, kept)
            print(f"{step + 1}/{steps} loss {loss.item():.3f} {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("family", choices=FAMILIES)
    arguments.add_argument("text")
    arguments.add_argument("folder")
    arguments.add_argument("--steps", type=int, default=2600)
    arguments.add_argument("--threads", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor(tokenizer(Path(given.text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    model = make_model(given.family, tokenizer)
    train(model, ids, given.steps, folder / "training.pt")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
