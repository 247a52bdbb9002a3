"""Tiny mixtures whose experts are removed."""

import re

import tiny_mixtures
import torch
import transformers as hf
from tiny_mixtures import family

from optimum_moonshot.model.layer_kinds import expert_parameters

REFUSED = {
    "deepseek_v4": "their tokens depend on more than the router's scores",
    "inkling_text": "has no setting with 3 of 4 experts",
    "jetmoe": "the arguments of JetMoeParallelExperts do not show which token",
    "longcat_flash": "LongcatFlashExperts does not take tokens with one expert each",
}
FAMILIES = tuple(name for name in tiny_mixtures.FAMILIES if name not in REFUSED)
SIZES = {"hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2]}}  # one expert by default


def model_of(name):
    if name not in SIZES:
        return family(name).float()
    config = family(name).config
    for field, value in SIZES[name].items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval().float()


def settled(model):
    """Make tokens, experts, routing and biases matter: at initialisation they hardly do."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        for key in expert_parameters(module):
            module._parameters[key].data.normal_(std=0.2, generator=generator)
    for name, tensor in model.state_dict().items():
        if "bias" in name and not tensor.any():
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        elif re.search(r"embed\w*\.weight$", name) or (
            re.search(r"(gate|router)(\.\w+)?\.weight$", name) and tensor.shape[0] == 4
        ):
            tensor.normal_(generator=generator)
    return model
