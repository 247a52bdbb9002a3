"""Tiny random models of many architectures, on which every path of the package runs in well under a second."""

import torch
import transformers as hf

TEXT = dict(
    vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
EDGE = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

CAUSAL = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama-tied-biased": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "mistral-sliding": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=96,
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            **EDGE,
        )  # fmt: skip
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=16, n_inner=24, n_layer=3, n_head=4, n_positions=64, **EDGE)
    ),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(vocab_size=96, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, **EDGE)
    ),
    "falcon-alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(vocab_size=96, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, alibi=True, **EDGE)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=96, hidden_size=16, n_layer=3, n_head=4, **EDGE)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**TEXT)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
}
ENCODERS = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT)),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**TEXT, embedding_size=8)),
}
VISION = {
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )  # fmt: skip
    ),
}


def make(name: str) -> torch.nn.Module:
    """A model with reproducible, spread-out random weights, in evaluation mode."""
    torch.manual_seed(0)
    model = {**CAUSAL, **ENCODERS, **VISION}[name]()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


def token_batches(samples: int = 6, length: int = 12, size: int = 2, padded: bool = False, seed: int = 0):
    """Batches of token ids; padded ones have samples of unequal length, with attention masks."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for start in range(0, samples, size):
        count = min(size, samples - start)
        batch = {"input_ids": torch.randint(3, 96, (count, length), generator=generator)}
        if padded:
            mask = torch.ones(count, length, dtype=torch.long)
            mask[0, length - 1 - start :] = 0
            batch["attention_mask"] = mask
            batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, 0)
        batches.append(batch)
    return batches


def image_batches(samples: int = 6, size: int = 2, seed: int = 0):
    """Batches of images with labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (size,), generator=generator),
        }
        for _ in range(0, samples, size)
    ]
