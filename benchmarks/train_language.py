"""Train the other language models of the benchmarks, of other families than the one in examples/.

    python benchmarks/train_language.py opt TEXT FOLDER        # about 2 hours on one core; benchmarks/opt_model
    python benchmarks/train_language.py mixture TEXT FOLDER    # about 1 hour; benchmarks/mixture_model
    python benchmarks/train_language.py heads TEXT FOLDER --steps 300 --rate 1e-3    # 10 minutes; heads_model

"opt" has LayerNorm, biases, learned positions, ReLU and tied embeddings; "mixture" is a small Qwen3-MoE: 16 experts in
each of 4 decoder layers, 4 per token; "heads" is the shipped Llama as a Mistral with 8 heads of 32 and 4 key-value
heads, half of a shipped head each, trained on. TEXT is a plain text file; the tokenizer is the shipped model's. FOLDER
gets the model in bfloat16, and a checkpoint every 100 steps, from which training resumes.
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
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

MODEL = Path(__file__).parents[1] / "examples" / "demo_model"
LENGTH, BATCH = 256, 16


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


def split_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Divide every head of a Llama into two of half its size, adjacent in their key-value group, as a Mistral.

    It computes the same as a Llama, whose configuration refuses 6 heads in a hidden size of 256.
    Rotary positions turn dimensions i and i + size / 2 of a head by θ^(-2i / size). The first half gets the pairs of
    even i, which have the frequencies of a head of half the size; the second half gets those of odd i, whose
    frequencies change a little. Values divide in the middle. As the scores of a head divide among its halves, the
    queries are scaled by √2 beside the √2 of the scale 1 / √size, so that a half attends on average as the head did.
    """
    old = model.config
    half = old.head_dim // 2
    config = MistralConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=2 * old.num_attention_heads,
        num_key_value_heads=2 * old.num_key_value_heads,
        head_dim=half,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=old.rope_parameters,
        sliding_window=None,
        tie_word_embeddings=True,
        **{f"{name}_token_id": getattr(old, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    )
    turned = torch.stack([torch.cat([torch.arange(i, half, 2), torch.arange(i, half, 2) + half]) for i in (0, 1)])
    valued = torch.arange(2 * half).view(2, half)

    def order(halves: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows of the heads: per key-value head all first halves, then all second ones."""
        first = 2 * half * torch.arange(heads).view(old.num_key_value_heads, 1, -1, 1)
        return (first + halves[:, None]).flatten()

    heads, shared = old.num_attention_heads, old.num_key_value_heads
    weights = {}
    for name, weight in model.state_dict().items():
        if "q_proj" in name:
            weight = weight[order(turned, heads)] * math.sqrt(2)
        elif "k_proj" in name:
            weight = weight[order(turned, shared)]
        elif "v_proj" in name:
            weight = weight[order(valued, shared)]
        elif "o_proj" in name:
            weight = weight[:, order(valued, heads)]
        weights[name] = weight
    divided = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    divided.load_state_dict(weights)
    return divided


def make_model(family: str, tokenizer) -> PreTrainedModel:
    if family == "heads":
        return split_heads(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return AutoModelForCausalLM.from_config(FAMILIES[family](len(tokenizer), special), dtype=torch.float32)


def rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1, (step + 1) / 100) * (0.5 * (1 + math.cos(math.pi * step / steps)) * 0.95 + 0.05)


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


def train(model: PreTrainedModel, ids: torch.Tensor, steps: int, peak: float, kept: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    first = 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    started = time.perf_counter()
    for step in range(first, steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps, peak)
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
    arguments.add_argument("family", choices=[*FAMILIES, "heads"])
    arguments.add_argument("text")
    arguments.add_argument("folder")
    arguments.add_argument("--steps", type=int, default=2600)
    arguments.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    arguments.add_argument("--threads", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor(tokenizer(Path(given.text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    model = make_model(given.family, tokenizer)
    train(model, ids, given.steps, given.rate, folder / "training.pt")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
