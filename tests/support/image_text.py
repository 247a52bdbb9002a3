"""Tiny vision–language models, with a processor of pictures and text in plain code."""

import datasets
import numpy as np
import torch
import transformers as hf
from PIL import Image

IMAGE = 90  # the placeholder's token
SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
EDGE = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def llava():
    vision = hf.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4)
    text = hf.LlamaConfig(**SMALL, **EDGE, vocab_size=96, num_key_value_heads=1, max_position_embeddings=64)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return hf.LlavaForConditionalGeneration(config)


def qwen2_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = dict(**SMALL, **EDGE, vocab_size=96, num_key_value_heads=1, max_position_embeddings=64, rope_parameters=rope)
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2)
    ids = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


def qwen2_5_vl():
    """Like Qwen2-VL, with RMS norms and gated layers in the vision tower, and attention in windows."""
    vision = dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=16)
    vision |= dict(window_size=8, fullatt_block_indexes=[1], spatial_merge_size=2)
    text = {**qwen2_vl().config.text_config.to_dict(), "model_type": "qwen2_5_vl_text"}
    ids = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def paligemma():
    """A vision tower with biases, and a language model with tied embeddings and norms whose gain is 1 + the weight."""
    vision = hf.SiglipVisionConfig(**SMALL, image_size=8, patch_size=4, projection_dim=16)
    text = dict(**SMALL, **EDGE, vocab_size=96, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
    config = dict(vision_config=vision, text_config=hf.GemmaConfig(**text), image_token_index=IMAGE, projection_dim=16)
    return hf.PaliGemmaForConditionalGeneration(hf.PaliGemmaConfig(**config, **EDGE))


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl}
MORE = {**MODELS, "qwen2_5_vl": qwen2_5_vl, "paligemma": paligemma}


def made(name):
    torch.manual_seed(0)
    return MORE[name]().eval()


class Words:
    """A tokenizer of single characters, in which <image> is a token."""

    def __call__(self, text):
        parts = text.split("<image>")
        codes = [[3 + ord(letter) % 80 for letter in part] for part in parts]
        return codes[0] + [token for part in codes[1:] for token in (IMAGE, *part)]


class Processor:
    """A vision–language processor in plain code: pictures of 8×8 in patches of 4×4."""

    image_processor, image_token, chat_template = object(), "<image>", None

    def __init__(self, packed):
        self.packed, self.tokenizer, self.shown = packed, Words(), []

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        part = {"image": lambda part: "<image>", "text": lambda part: part["text"]}
        return "|".join("".join(part[p["type"]](p) for p in message["content"]) for message in messages)

    def __call__(self, images, text, return_tensors):
        self.shown += text
        pixels = torch.stack([torch.tensor(np.array(image.resize((8, 8)))).permute(2, 0, 1) / 255 for image in images])
        ids = [token for token in self.tokenizer(text[0]) for _ in range(self.tokens if token == IMAGE else 1)]
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if not self.packed:
            return {**inputs, "pixel_values": pixels}
        grid = torch.tensor([[1, 2, 2]] * len(images))
        types = (inputs["input_ids"] == IMAGE).long()
        patches = pixels.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)  # [image, row, column, channel, …]
        patches = patches[..., None, :, :].expand(*patches.shape[:4], 2, 4, 4).reshape(4 * len(images), -1)
        return {**inputs, "mm_token_type_ids": types, "pixel_values": patches, "image_grid_thw": grid}

    @property
    def tokens(self):
        """Placeholder tokens of one image."""
        return 1 if self.packed else 4


def processor(name):
    return Processor(name.startswith("qwen"))


def pictures(count):
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 255, (8 + i, 8, 3), dtype=np.uint8)) for i in range(count)]


def rows(count=5, **columns):
    columns = columns or {"text": [f"a picture of {'x' * i} things" for i in range(count)]}
    return datasets.Dataset.from_dict({"image": pictures(count), **columns})
