"""Tiny random models of many architectures, on which every path of the package runs in well under a second."""

import torch
import transformers as hf
from torch import nn

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
PATCHED = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4,
    num_labels=5,
)  # fmt: skip
STAGED = dict(hidden_sizes=[8, 16], depths=[1, 2], num_labels=5)
VISION = {
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**PATCHED)),
    "deit": lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**PATCHED)),
    "resnet": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**STAGED, embedding_size=8, layer_type="basic")),
    "resnet-bottleneck": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(**{**STAGED, "hidden_sizes": [16, 32]}, embedding_size=8, layer_type="bottleneck")
    ),
    "convnext": lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(**STAGED, patch_size=2, num_stages=2, image_size=16, layer_scale_init_value=0.5)
    ),
}


class ConvNet(nn.Module):
    """A plain module: grouped, strided, dilated and reflecting convolutions, activations in place, a side path."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding="same")
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, padding_mode="reflect", bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.depthwise = nn.Conv2d(8, 8, (3, 5), padding="same", groups=8)
        self.dilated = nn.Conv2d(8, 12, 3, padding=2, dilation=2)
        self.side = nn.Conv2d(8, 12, 1)
        self.inner = nn.Linear(12, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        x = self.act(self.norm(self.grouped(self.act(self.stem(images)))))
        x = self.act(self.depthwise(x))
        x = self.act(self.dilated(x) + self.side(x))
        return self.head(self.inner(x.mean((2, 3))).tanh())


class CalledTwice(nn.Module):
    """A plain module that calls a convolution at two resolutions."""

    def __init__(self):
        super().__init__()
        self.stem, self.twice = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.mixed, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 5)

    def forward(self, images):
        x = self.twice(self.stem(images).relu()).relu()
        x = self.twice(nn.functional.max_pool2d(x, 2)).relu()
        return self.head(self.mixed(x).relu().mean((2, 3)))


PLAIN = {"convnet": ConvNet, "called twice": CalledTwice}


def make(name: str) -> nn.Module:
    """A model with reproducible, spread-out random weights, in evaluation mode."""
    torch.manual_seed(0)
    return spread({**CAUSAL, **ENCODERS, **VISION, **PLAIN}[name]())


def spread(model: nn.Module) -> nn.Module:
    """The model with weights large enough for every layer to matter, in evaluation mode."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training, so that training mode is noticed
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
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
