"""A tiny model of every architecture that transformers implements."""

import pytest
import torch
import transformers as hf
from tiny_configs import tiny_config

CONV1D, REACHED = "Conv1d with weights", "no calibration data reached it"
READ, ROUTER, OWN = (
    "its weight is read where its forward is not called",
    "a router of experts",
    "overrides the forward of",
)
INPUTS = "do not divide into groups"
# family: class, lengths of the sequential blocks, non-sequential blocks, parts of the reasons for dense layers; an
# entry with two values covers two releases of transformers
CAUSAL = {
    "llama": ("LlamaForCausalLM", [2], 0, []),
    "qwen3": ("Qwen3ForCausalLM", [2], 0, []),
    "gemma4_text": ("Gemma4ForCausalLM", [2], 0, []),
    "phimoe": ("PhimoeForCausalLM", [2], 0, [OWN]),
    "deepseek_v3": ("DeepseekV3ForCausalLM", [2], 0, ["TopkRouter"]),
    "gpt_oss": ("GptOssForCausalLM", [2], 0, ["TopKRouter"]),
    "llama4_text": ("Llama4ForCausalLM", [2], 0, [OWN]),
    "qwen3_next": ("Qwen3NextForCausalLM", [2], 0, ["TopKRouter", CONV1D]),
    "mamba": ("MambaForCausalLM", [2], 0, [READ, CONV1D, "MambaMixer"]),
    "jamba": ("JambaForCausalLM", [2], 0, [READ, CONV1D, ("TopKRouter", ROUTER), "MambaMixer"]),
    "zaya": ("ZayaForCausalLM", None, 0, [CONV1D]),
    "jetmoe": ("JetMoeForCausalLM", [2], 0, [ROUTER]),
    "xlnet": ("XLNetLMHeadModel", [2], 0, ["RelativeAttention"]),
    "xlm": ("XLMWithLMHeadModel", [], 4, []),
}
TOGETHER = {
    "llava": ("LlavaForConditionalGeneration", [2], 0, [REACHED]),
    "gemma3": ("Gemma3ForConditionalGeneration", [2], 0, [REACHED]),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", [2], 0, [REACHED]),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", [2, 2], 0, [REACHED]),
}
SEQ2SEQ = {
    "t5": ("T5ForConditionalGeneration", [2, 2], 0, []),
    "bart": ("BartForConditionalGeneration", [2, 2], 0, []),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", [2, 2], 0, []),
}
IMAGES = {
    "vit": ("ViTForImageClassification", [2], 0, []),
    "poolformer": ("PoolFormerForImageClassification", None, None, [INPUTS]),
    "pvt": ("PvtForImageClassification", None, None, ["PvtPatchEmbeddings"]),
    "swinv2": ("Swinv2ForImageClassification", [], 2, ["Swinv2SelfAttention", INPUTS]),
}
FAMILIES = {**CAUSAL, **TOGETHER, **SEQ2SEQ, **IMAGES}


def made(family):
    torch.manual_seed(0)
    name = FAMILIES[family][0]
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    return getattr(hf, name)(tiny_config(family, name)).eval()
