"""Tiny mixtures of experts, and their pruning."""

import pytest
import torch
import transformers as hf
from models import token_batches
from tiny_configs import tiny_config

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.calibration.accumulators import InputStatistic
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.losses import loss_gradient

# Family, class: fused in every layout: plain, transposed, interleaved, with biases, without gates, of Switch's kind.
FAMILIES = (  # fmt: skip
    "afmoe",
    "aria_text",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "inkling_text",
    "jamba",
    "jetmoe",
    "lfm2_moe",
    "llama4_text",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)


def family(name):
    kinds = hf.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name not in kinds:
        pytest.skip(f"this release of transformers has no {name}")
    torch.manual_seed(0)
    model = getattr(hf, kinds[name])(tiny_config(name, kinds[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all() or not parameter.any():  # uninitialised, or zeros
                parameter.normal_(std=0.1)
    return model


def mixtral(experts=4, **changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_local_experts=experts)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=64)
    return hf.MixtralForCausalLM(hf.MixtralConfig(**{**sizes, **heads, **changes})).eval()


def prune(model, batches=None, **options):
    pruner = MoonshotPruner(
        model,
        MoonshotConfig(
            **{"num_samples": 6, "fisher": None if options.get("pattern") == "experts" else "rows", **options}
        ),
    )
    pruner.prune(batches or token_batches(), progress=False)
    return pruner


def experts(model):
    return [layer for layer in find_structure(model).layers() if layer.separate]


def same(model, other):
    state, other_state = model.state_dict(), other.state_dict()
    return state.keys() == other_state.keys() and all(torch.equal(state[name], other_state[name]) for name in state)


class Seen(InputStatistic):
    """Counts the tokens of every group."""

    def __init__(self, layer, storage, device):
        self.count = torch.zeros(layer.groups)

    def add(self, inputs, groups):
        self.count[groups] += inputs.shape[1]

    def result(self):
        return self.count


def observe(model, layers, batches, gradients=True):
    samples = len(batches)
    wanted = {layer.name for layer in layers} if gradients else set()
    storage = Storage(torch.device("cpu"))
    with frozen(model), Observer(layers, False, wanted, samples, storage, extra=(Seen,)) as observer:
        for index, batch in enumerate(batches):
            observer.begin(index, 1, None)
            output = run_model(model, batch)
            if gradients:
                torch.autograd.backward(*loss_gradient(model, output, batch)[:2])
            observer.end()
    return {layer.name: observer.take(layer) for layer in layers}


def starving(model):
    """Route no token to expert 2 of the first block."""
    with torch.no_grad():
        weight = model.model.layers[0].mlp.gate.weight
        weight[2] = -100 * weight[[0, 1, 3]].mean(0)
        model.model.layers[0].post_attention_layernorm.weight.abs_()
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, args, output: never(output))
    return model


def never(output):
    """The router's choice without expert 2."""
    logits, weights, index = output
    other = torch.where((index == 3).any(1, keepdim=True), torch.where((index == 0).any(1, keepdim=True), 1, 0), 3)
    return logits, weights, torch.where(index == 2, other, index)
