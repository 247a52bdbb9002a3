"""Plans for large mixtures from their configurations alone, on one device: results/plan_mixtures.json.

Usage: python benchmarks/plan_mixtures.py
"""

import itertools
import time

import transformers as hf
from common import parser, write

from optimum_moonshot import MoonshotConfig, MoonshotPruner

MODELS = {
    "Qwen3-30B-A3B": hf.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        max_position_embeddings=40960, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    ),
    "Mixtral-8x7B": hf.MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
        architectures=["MixtralForCausalLM"], dtype="bfloat16",
    ),
}  # fmt: skip
DEVICE, HOST = "80GB", "512GB"


def main() -> None:
    parser(__doc__).parse_args()
    results = {}
    for name, config in MODELS.items():
        for lam, offload in itertools.product((1.0, 0.5), (None, "disk")):
            started = time.perf_counter()
            method = MoonshotConfig(sparsity=0.5, lam=lam, num_samples=128, sequence_length=2048, offload_dir="offload")
            machine = {"device_memory": DEVICE, "host_memory": HOST}
            plan = MoonshotPruner.plan_for(config, method, **machine, offload=offload)
            key = f"{name} λ={lam:g}" + ("" if offload is None else f", layers on {offload}")
            print(f"\n{key}\n{plan}", flush=True)
            results[key] = {**plan.to_dict(), "took": time.perf_counter() - started}
    write("plan_mixtures", results)


if __name__ == "__main__":
    main()
