"""Default configurations of all model families, shrunk according to the names of their fields."""

import copy
import re
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENS = 96
WIDTH = 32
# The first expression that matches a field's name gives its value.
RULES: tuple[tuple[str, Any], ...] = (
    (
        r"feat_extract_layers|adapter_layers|num_labels|num_channels|in_channels|in_chans|num_codebooks|use_|norm|eps|dropout|std|factor|scale",
        None,
    ),
    (r"vocab_size|vocab_size_per_layer_input|num_embeddings$|bpe_vocab", TOKENS),
    (r"(shared|zero)_experts?$|expert_n_group|n_group|topk_group|num_expert_group", 1),
    (r"shared_expert_intermediate", 16),
    (r"experts_per|num_selected|top_?k(_experts)?$|moe_topk|moe_k|expert_top", 2),
    (r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|num_moe_experts|ffn_num_experts", 4),
    (r"first_k_dense|moe_layer_start", 1),
    (r"(kv|key_value|k_v)_heads|num_query_groups|n_head_kv|multi_query_group_num|linear_num_key_heads", 2),
    (
        r"head_dim|d_kv$|head_size|kv_channels|attention_key_length|d_head|dim_head|qk_nope|qk_rope|v_head_dim|rotary_dim",
        8,
    ),
    (r"lora_rank|_rank$", 8),
    (r"heads$|n_heads?$|num_heads", 4),
    (r"(num|n)_(hidden_|decoder_|encoder_)?layers?$|(en|de)coder_layers$|n_layers?$|depth$|num_blocks$|_layers$", 2),
    (r"image_size|input_size$|img_size", 32),
    (r"patch_size|patch_dim", 8),
    (r"position|seq_len|_seq|n_ctx|context_len|max_length|sliding_window|max_source|max_target", 64),
    (r"intermediate|ffn|mlp_(dim|hidden)|d_?ff|dim_ff|n_inner|^d_inner|feed_forward|ff_dim|hidden_dim$", 48),
    (
        r"hidden_size|d_model|embed_dim|n_embd|n_embed|embedding_(dim|size)|width|projection_dim|_dim$|^dim$|_size$",
        WIDTH,
    ),
)
_KEYS = r"(kv|key_value)_heads$"
ONLY_EXCEPTIONS = {"cvt", "hgnet_v2", "levit", "pp_lcnet", "textnet"}  # many sizes that must agree
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def tiny_config(model_type: str, class_name: str) -> PreTrainedConfig:
    """A small configuration of a family, for one of its model classes."""
    kind = getattr(transformers, class_name).config_class or CONFIG_MAPPING[model_type]
    fields = EXCEPTIONS.get(model_type, {}) if model_type in ONLY_EXCEPTIONS else _kwargs(kind(), _Tokens())
    config = kind(**fields)
    if getattr(config, "decoder_start_token_id", None) is None:  # checkpoints define it
        config.decoder_start_token_id = 0
    return config


class _Tokens:
    """Map ids of special tokens outside the small vocabulary to distinct ids from its end."""

    def __init__(self):
        self.given: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        if 0 <= token < TOKENS - 20:
            return token
        return self.given.setdefault(token, TOKENS - 1 - len(self.given) % 20)


def _kwargs(config: PreTrainedConfig, tokens: _Tokens) -> dict[str, Any]:
    """The constructor's arguments of a small copy."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = {**_kwargs(value, tokens), "model_type": value.model_type}
        elif name == "layer_types" and value:
            fields[name] = kinds = _kinds(value)
            fields |= {count: len(kinds) for count in LAYERS if hasattr(config, count)}
        elif name == "rope_parameters" and isinstance(value, dict):
            fields[name] = _rope(value)
        elif re.search(r"token_(id|index)$|_id$", name) and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = tokens(value)
        elif re.search(_KEYS, name) and value == vars(config).get("num_attention_heads"):  # may differ by layer
            fields[name] = 4  # no grouped-query attention
        elif name not in fields and (small := _small(name, value)) is not None:
            fields[name] = small
    return fields | EXCEPTIONS.get(config.model_type, {})


def _kinds(layer_types: list[str]) -> list[str]:
    """Each kind of layer once, at least two."""
    kinds = list(dict.fromkeys(layer_types))
    return kinds if len(kinds) > 1 else kinds * 2


def _rope(value: dict) -> dict:
    rope = copy.deepcopy(value)
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]
    return rope


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        return None
    rule = next((small for expression, small in RULES if re.search(expression, name)), None)
    if isinstance(value, int):
        return rule if rule is not None and value > rule else None
    if not value or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return None
    if re.search(r"depth|num_layers", name):
        return type(value)(1 for _ in value)
    if re.search(r"hidden_sizes|embed_dims|channels|dims$|num_heads|num_attention_heads|out_features", name):
        start = 1 if "head" in name else 16
        return type(value)(max(1, round(start * item / min(value))) for item in value)
    if rule is not None and "size" in name:
        return type(value)(min(item, rule) for item in value)
    return None


MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 1, 1]}
HALF_MROPE = {**MROPE, "mrope_section": [1, 1, 0]}
DEPTHS = {"depths": [1, 1], "num_heads": [1, 2], "image_size": 32, "patch_size": 4, "window_size": 4}
ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
IMAGE_TOKENS = {"<image>": 95, "<racm3:break>": 94, "<eoss>": 93, "<|image token|>": 92}
VOCABULARY = {**IMAGE_TOKENS, **{f"IMGIMGIMG{chr(65 + i)}Z": 80 + i for i in range(8)}}
# Not deducible from names: values that must agree, and required fields whose default is None.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {kind: MROPE for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 48}},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]},
    "bamba": MAMBA,
    "granitemoehybrid": MAMBA,
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "zamba": {**ZAMBA, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4, **ZAMBA},
    "longcat_flash": {"qk_head_dim": 16},
    "deepseek_v3": {"qk_head_dim": 16, "first_k_dense_replace": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4], "mlp_layer_types": ["dense", "sparse"]},
    "gemma": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        "swa_head_dim": 16,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4], "mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 4},
    "hunyuan_vl_text": {"head_dim": 8},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 3},
    "nystromformer": {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 5},
    "siglip2_vision_model": {"num_patches": 16},
    "encoder-decoder": {"pad_token_id": 0},
    "speech_to_text": {"input_feat_per_channel": 80},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "granite_speech5_encoder": {"input_dim": 80},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"intermediate_size": 48, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {"rope_parameters": HALF_MROPE},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "chameleon": {"vocabulary_map": VOCABULARY},
    "emu3": {"vocabulary_map": VOCABULARY},
    "swin": DEPTHS,
    "donut-swin": DEPTHS,
    "swinv2": DEPTHS,
    "esmc": {"vocab_size": 96},
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": [8, 8]},
    "longformer": {"attention_window": [8, 8]},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [16, 16, 16, 24, 32, 32, 64], "image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "levit": {
        **{"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3], "key_dim": [8, 8, 8]},
        "depths": [1, 1, 1],
    },
    "cvt": {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
    "hgnet_v2": {
        **{"stem_channels": [3, 8, 16], "stage_in_channels": [16, 32, 48, 64], "stage_mid_channels": [8, 8, 16, 16]},
        **{"stage_out_channels": [32, 48, 64, 64], "hidden_sizes": [32, 48, 64, 64], "stage_num_blocks": [1, 1, 2, 1]},
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "textnet": {"image_size": [64, 64], "stem_out_channels": 16, "hidden_sizes": [16, 16, 24, 32, 48]},
    "blt": {"encoder_hash_byte_group_vocab": TOKENS},
    "chameleon_vqgan": {"base_channels": 32, "latent_channels": 32},
    "emu3_vqgan": {"base_channels": 32, "num_res_blocks": 1},
    "florence_vision": {"embed_dim": [16, 32, 48, 64], "num_heads": [1, 2, 3, 4], "num_groups": [1, 2, 3, 4]},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "moonshine": {"pad_token_id": 0},
    "seamless_m4t": {"feature_projection_input_dim": 160},
    "seamless_m4t_v2": {"feature_projection_input_dim": 160},
    "wav2vec2-bert": {"vocab_size": 96, "feature_projection_input_dim": 160},
    "wav2vec2-conformer": {"vocab_size": 96},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_latents": 8, "num_self_attends_per_block": 2},
}
