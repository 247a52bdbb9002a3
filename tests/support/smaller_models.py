"""Folders with models that pruning made smaller, of sizes that runtimes for inference support.

The tokenizer is that of the shipped model; the vocabulary has a few tokens more, as those of many models. Neurons are
left in odd numbers, which no block size of a format divides.
"""

import shutil

import torch
import transformers as hf
from command_line import DEMO
from models import spread

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.model.depth import remove_blocks
from optimum_moonshot.shrink.hidden_size import cut_stream
from optimum_moonshot.shrink.stream import observe_stream

EDGE = dict(pad_token_id=2, bos_token_id=0, eos_token_id=1)
TEXT = dict(
    vocab_size=2064, hidden_size=192, intermediate_size=90, num_hidden_layers=2, num_attention_heads=6,
    max_position_embeddings=64, **EDGE,
)  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 3}
ODD_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 45}
ONE_HEAD = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 45}
STRUCTURED = dict(solver="magnitude", pattern="structured", sparsity=0.5)
BLOCKS = (0, 2)
WIDTH = 96  # a smaller hidden size
SHRINK = dict(parameters=0.5, hidden_multiple=32)
EXPERTS = dict(solver="osscar", pattern="experts", sparsity=0.25, lam=1, num_samples=4)


def QWEN2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, num_key_value_heads=6))


# name: dense model, settings or blocks that make it smaller, fields of the smaller configuration
SMALLER = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)), STRUCTURED, ODD_HEADS),
    "llama-tied-biased": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
        ),
        STRUCTURED,
        ONE_HEAD,
    ),
    "qwen2": (QWEN2, {**STRUCTURED, "ignore": ["o_proj"]}, {"num_attention_heads": 6, "intermediate_size": 45}),
    "qwen2-heads": (QWEN2, STRUCTURED, {**ODD_HEADS, "head_dim": 32}),
    "qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=64)), STRUCTURED, ONE_HEAD),
    "opt": (
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=2064, hidden_size=192, word_embed_proj_dim=192, ffn_dim=90, num_hidden_layers=2,
                num_attention_heads=6, max_position_embeddings=64, **EDGE,
            )  # fmt: skip
        ),
        STRUCTURED,
        {"ffn_dim": 45, "num_attention_heads": 6},
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=2064, n_embd=192, n_inner=90, n_layer=2, n_head=6, n_positions=64, **EDGE)
        ),
        STRUCTURED,
        {"n_inner": 45, "n_head": 6},
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**{**GROUPED, "intermediate_size": 96}, num_local_experts=4)),
        EXPERTS,
        {"num_local_experts": 3, "num_attention_heads": 6},
    ),
    "llama-blocks": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "num_hidden_layers": 4, "intermediate_size": 45})),
        BLOCKS,
        {"num_hidden_layers": 2, "intermediate_size": 45},
    ),
    "llama-hidden": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "intermediate_size": 45})),
        WIDTH,
        {"hidden_size": WIDTH, "num_attention_heads": 6, "head_dim": 32, "intermediate_size": 45},
    ),
    "qwen3-shrunk": (
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=64, tie_word_embeddings=True)),
        SHRINK,
        {"head_dim": 64},  # the widths are the choice of `shrink`
    ),
}  # fmt: skip


def make_smaller(name, folder):
    """Save the smaller model of this name and the tokenizer, in several shards; returns its logits for `prompts()`."""
    build, settings, fields = SMALLER[name]
    torch.manual_seed(0)
    model = spread(build())
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if settings is BLOCKS:
        source = model = remove_blocks(model, settings)[0]
    elif settings is WIDTH:
        source = model = cut_stream(observe_stream(model, batches()), settings)[0]
    else:
        source = _pruned(model, settings)
        model = source.model
    source.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, folder)
    assert {field: getattr(model.config, field) for field in fields} == fields
    return logits(model, prompts())


def _pruned(model, settings):
    if settings is SHRINK:
        config = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8)
        pruner = MoonshotPruner(model, config)
        pruner.shrink(batches(8), **settings, progress=False)
        return pruner
    pruner = MoonshotPruner(model, MoonshotConfig(**settings))
    if settings is EXPERTS:
        pruner.prune(batches(), progress=False)
    else:
        pruner.prune(progress=False)
        pruner.compact()
    return pruner


def batches(samples=4):
    return [{"input_ids": prompts(samples, 32)}]


def prompts(samples=2, length=11):
    """Token ids of the tokenizer that are no special tokens."""
    return torch.randint(3, 2048, (samples, length), generator=torch.Generator().manual_seed(samples * length))


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits
