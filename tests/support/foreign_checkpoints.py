"""Checkpoints as others publish them: FP8, MXFP4, compressed-tensors, GGUF, and weights that transformers ignores."""

import json

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DEEPSEEK = SIZES | dict(
    num_hidden_layers=3, num_key_value_heads=4, num_nextn_predict_layers=1, moe_intermediate_size=32,
    n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
)  # fmt: skip


def configure(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def read(folder):
    """The configuration and the tensors of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def write(folder, tensors, **changes):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    configure(folder, **changes)


def llama(folder):
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16().save_pretrained(folder)


def fp8(folder, make=llama):
    """As DeepSeek and Qwen publish it: a scale per block of 128 x 128."""
    make(folder)
    _, tensors = read(folder)
    for name in [name for name in tensors if "_proj." in name]:
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write(folder, tensors, quantization_config=entry)


def mxfp4(folder):
    """As gpt-oss is published: experts of 4 bits."""
    torch.manual_seed(0)
    sizes = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **sizes)).bfloat16().save_pretrained(folder)
    _, tensors = read(folder)
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(blocks, 120, dtype=torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(folder, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})


def deepseek(folder, ahead=61, **sizes):
    """A model with a layer that predicts a second token, which transformers does not load."""
    torch.manual_seed(0)
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK | sizes)).bfloat16()
    model.save_pretrained(folder)
    _, tensors = read(folder)
    new = {
        name.replace("layers.2.", f"layers.{ahead}."): t.clone() for name, t in tensors.items() if "layers.2." in name
    }
    new[f"model.layers.{ahead}.eh_proj.weight"] = torch.randn(64, 128).bfloat16()
    write(folder, tensors | new)
    return new


def gguf(path):
    """A Llama of 8 bits with a tokenizer of single letters."""
    import gguf as library
    import numpy as np

    torch.manual_seed(0)
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(128)
    tokens = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]
    tokens += [f"<{number}>" for number in range(len(tokens), 128)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1 if len(token) == 1 or token == "ab" else 3 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name, *shape):
        data = (0.2 * torch.randn(shape)).numpy() if len(shape) > 1 else np.ones(shape, dtype=np.float32)
        kind = library.GGMLQuantizationType.Q8_0
        if len(shape) > 1:
            writer.add_tensor(name, library.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", 128, 64)
    add("output.weight", 128, 64)
    add("output_norm.weight", 64)
    for block in ("blk.0", "blk.1"):
        for name, rows in {
            "attn_q": 64,
            "attn_k": 32,
            "attn_v": 32,
            "attn_output": 64,
            "ffn_gate": 64,
            "ffn_up": 64,
            "ffn_down": 64,
        }.items():
            add(f"{block}.{name}.weight", rows, 64)
        add(f"{block}.attn_norm.weight", 64)
        add(f"{block}.ffn_norm.weight", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
