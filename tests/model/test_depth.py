"""Removal of blocks: a smaller model of the same class, equal to the larger one where the blocks return their input."""

import pytest
import torch
import transformers as hf
from marks import slow
from models import CAUSAL, EDGE, GROUPED, TEXT, image_batches, make, spread, token_batches
from offloaded_models import offloaded

from optimum_moonshot import MoonshotError
from optimum_moonshot.model import depth
from optimum_moonshot.model.depth import BlockSearch, remove_blocks, skipping
from optimum_moonshot.model.layers import find_blocks

REMOVABLE = [*CAUSAL, "bert", "roberta", "vit", "deit"]
FOUR = {**GROUPED, "num_hidden_layers": 4}
MIXED = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**FOUR, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**FOUR, head_dim=8, sliding_window=4)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**FOUR)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**FOUR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[0, 2])
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**TEXT, "num_hidden_layers": 4}, num_key_value_heads=4, first_k_dense_replace=2, n_routed_experts=4,
            num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        )  # fmt: skip
    ),
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            vocab_size=96, hidden_size=16, num_layers=4, num_heads=4, max_position_embeddings=64, window_size=4,
            attention_types=[[["global", "local"], 2]], **EDGE,
        )  # fmt: skip
    ),
}  # fmt: skip


def mixed(name):
    """A model of four blocks of two kinds."""
    torch.manual_seed(0)
    return spread(MIXED[name]())


def bart():
    torch.manual_seed(0)
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in SIDE.items()}
    config = hf.BartConfig(vocab_size=96, d_model=16, max_position_embeddings=64, **sides, **EDGE)
    return spread(hf.BartForConditionalGeneration(config))


SIDE = {"layers": 2, "ffn_dim": 24, "attention_heads": 4}


def inputs_of(model):
    name = model.main_input_name
    batch = (image_batches() if name == "pixel_values" else token_batches(length=24))[0]
    extra = {"decoder_input_ids": batch[name].flip(1)} if model.config.is_encoder_decoder else {}
    return {name: batch[name], **extra}


@torch.no_grad()
def logits(model, skipped=()):
    blocks = [module for _, module in find_blocks(model)]
    with skipping(blocks[block] for block in skipped):
        return model(**inputs_of(model)).logits


def assert_removed(model, blocks, folder):
    """Remove blocks, compare with skipping them, load the saved model with transformers alone, return the config."""
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    gone = [module for index, (_, module) in enumerate(find_blocks(model)) if index in blocks]
    small, done = remove_blocks(model, blocks)
    expected = logits(model, blocks)
    assert torch.allclose(logits(small), expected, atol=1e-5)
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    assert done.parameters == (model.num_parameters(), small.num_parameters())
    assert done.parameters[0] - done.parameters[1] == sum(each.numel() for block in gone for each in block.parameters())
    small.save_pretrained(folder)
    assert torch.equal(logits(type(model).from_pretrained(folder)), logits(small))
    for parameter in small.parameters():
        parameter.data.fill_(7)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    return done.config


@pytest.mark.parametrize("name", REMOVABLE)
def test_removing_a_block_equals_skipping_it(name, tmp_path):
    changes = assert_removed(make(name), [1], tmp_path)
    assert [change for change in changes.values() if change == (3, 2)], changes


@pytest.mark.parametrize("blocks", [(0,), (3,), (0, 3), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("name", MIXED)
def test_remaining_blocks_keep_their_kind(name, blocks, tmp_path):
    assert_removed(mixed(name), blocks, tmp_path)


def test_windows_longer_than_the_probe_are_compared(tmp_path):
    """The kind of a block follows from its attributes, not only from its outputs on a few tokens."""
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**FOUR, head_dim=8, sliding_window=1000))
    small, _ = remove_blocks(spread(model), [0])
    windows = [block.self_attn.sliding_window for block in model.model.layers]
    assert windows == [1000, None, 1000, None]
    assert [block.self_attn.sliding_window for block in small.model.layers] == windows[1:]


def test_several_lists_of_blocks_lose_some_at_once(tmp_path):
    changes = assert_removed(bart(), [0, 3], tmp_path)
    assert changes["encoder_layers"] == (2, 1) and changes["decoder_layers"] == (2, 1)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma2"])
def test_generation_with_the_smaller_cache(name):
    model, ids = make(name), token_batches()[0]["input_ids"]
    small, _ = remove_blocks(model, [0])
    assert len(small(ids, use_cache=True).past_key_values.layers) == 2
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    cached, again = (small.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, again)


def test_the_order_of_blocks_does_not_matter():
    model = make("llama")
    (one, first), (other, second) = (remove_blocks(model, blocks) for blocks in ([0, 2], [2, 0, 2]))
    assert first == second and first.blocks == ("model.layers.0", "model.layers.2")
    assert torch.equal(logits(one), logits(other))


def test_settings_of_the_model_remain():
    model = make("llama").to(torch.bfloat16).train()
    model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    model.generation_config.max_length = 17
    small, _ = remove_blocks(model, [1])
    frozen = [name for name, parameter in small.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.layers.1.mlp.up_proj.weight"]
    assert small.dtype == torch.bfloat16 and small.training and small.generation_config.max_length == 17


def test_tied_weights_remain_tied():
    small, _ = remove_blocks(make("llama-tied-biased"), [1])
    assert small.lm_head.weight is small.model.embed_tokens.weight


def gpt2_scaled():
    config = hf.GPT2Config(vocab_size=96, n_embd=16, n_layer=3, n_head=4, scale_attn_by_inverse_layer_idx=True, **EDGE)
    return spread(hf.GPT2LMHeadModel(config))


def moe_every_second():
    config = hf.Qwen3MoeConfig(
        **FOUR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=2
    )
    return spread(hf.Qwen3MoeForCausalLM(config))


def t5():
    config = hf.T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, **EDGE)
    return spread(hf.T5ForConditionalGeneration(config))


REFUSED = {
    "outside": (lambda: make("llama"), [3], "3 blocks"),
    "negative": (lambda: make("llama"), [-1], "3 blocks"),
    "none": (lambda: make("llama"), [], "no block to remove"),
    "all": (lambda: make("llama"), [0, 1, 2], "would have no block"),
    "shared": (lambda: make("albert"), [0], "would have no block"),
    "all of a decoder": (bart, [2, 3], "model.decoder.layers would have no block"),
    "stages": (lambda: make("resnet"), [0], "no setting"),
    "other shape": (lambda: make("convnext"), [1], "cannot be removed"),
    "scale by index": (gpt2_scaled, [0], "differs|would be"),
    "kind by index": (moe_every_second, [0], "no setting .*block 1: mlp"),
    "first has the bias": (t5, [0], "no setting .*relative_attention_bias"),
    "not transformers": (lambda: torch.nn.Linear(2, 2), [0], "PreTrainedModel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    build, blocks, message = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises(MoonshotError, match=message):
        remove_blocks(build(), blocks)


def test_the_second_block_of_every_kind_can_go(tmp_path):
    """Where blocks alternate in kind, a pair of them leaves the other kinds as they are."""
    assert_removed(moe_every_second(), [2, 3], tmp_path)


def test_backbones_and_rates_of_dropped_paths(tmp_path):
    """A list of returned blocks and a rate that depends on the depth do not change the remaining blocks."""
    for model in (
        hf.Dinov2ForImageClassification(hf.Dinov2Config(**VISION, mlp_ratio=2)),
        hf.BeitForImageClassification(hf.BeitConfig(**VISION, intermediate_size=24, drop_path_rate=0.1)),
    ):
        assert_removed(spread(model), [0], tmp_path / type(model).__name__)


VISION = dict(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4, layerscale_value=0.5,
    layer_scale_init_value=0.5,
)  # fmt: skip


def test_blocks_that_share_what_the_first_computes(tmp_path):
    torch.manual_seed(0)
    assert_removed(t5(), [1, 3], tmp_path)


def test_offloaded_models_are_refused(tmp_path):
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(MoonshotError, match="offload"):
        remove_blocks(offloaded(tmp_path).model, [0])


def test_a_smaller_model_with_other_outputs_is_refused(monkeypatch):
    """The comparison with the larger model notices blocks in another order."""
    copied = depth.copied
    model = make("llama")
    state = model.state_dict()
    swapped = {"model.layers.0.": "model.layers.2.", "model.layers.1.": "model.layers.0."}  # of 15 characters

    def wrong(tensors):
        return copied({name: state[swapped.get(name[:15], name[:15]) + name[15:]] for name in tensors})

    monkeypatch.setattr(depth, "copied", wrong)
    with pytest.raises(MoonshotError, match="differs"):
        remove_blocks(model, [1])


HYBRID = {**GROUPED, "hidden_size": 32, "num_hidden_layers": 4}
RECURRENT = dict(mamba_d_state=8, mamba_d_head=16, mamba_n_heads=4, mamba_n_groups=1, mamba_chunk_size=16)
HYBRIDS = {  # the last block alone has attention
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **HYBRID, attn_layer_period=4, attn_layer_offset=3, expert_layer_period=2, expert_layer_offset=1,
            num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
        )  # fmt: skip
    ),
    "bamba": lambda: hf.BambaForCausalLM(hf.BambaConfig(**HYBRID, **RECURRENT, attn_layer_indices=[3])),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**HYBRID, layer_types=["conv"] * 3 + ["full_attention"])),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **HYBRID, layer_types=["linear_attention"] * 3 + ["full_attention"], head_dim=8, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=0,
        )  # fmt: skip
    ),
}  # fmt: skip


def hybrid(name):
    torch.manual_seed(0)
    return HYBRIDS[name]().eval()


@pytest.mark.parametrize("name", ["jamba", slow("bamba"), "lfm2", slow("qwen3_next")])
def test_the_last_attention_of_a_hybrid_stays(name):
    """Without it the cache does not know how many tokens it has, and every call with the cache fails."""
    model, ids = hybrid(name), token_batches()[0]["input_ids"]
    with pytest.raises(MoonshotError, match="cannot be called with its cache"):
        remove_blocks(model, [2, 3])
    search = BlockSearch(model)
    assert frozenset({3}) in search.kinds and sorted(block for kind in search.kinds for block in kind) == [0, 1, 2, 3]
    assert "keys and values" in search.refusal([3]) and search.refusal([0]) is None
    small, _ = remove_blocks(model, [0, 1])
    assert small.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1] == ids.shape[1] + 4


def test_a_dense_model_without_a_cache_of_keys_may_lose_blocks_all_the_same():
    torch.manual_seed(0)
    config = hf.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=3, state_size=4, **EDGE)
    model = hf.MambaForCausalLM(config).eval()
    assert BlockSearch(model).refusal([0]) is None and BlockSearch(model).kinds == [frozenset({0, 1, 2})]
    assert remove_blocks(model, [0])[1].parameters[1] < model.num_parameters()


def test_a_model_that_transformers_cannot_create_is_refused():
    torch.manual_seed(0)
    config = hf.RwkvConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, context_length=64, **EDGE)
    with pytest.raises(MoonshotError, match="RwkvForCausalLM of this size cannot be created .division by zero"):
        remove_blocks(hf.RwkvForCausalLM(config).eval(), [1])
