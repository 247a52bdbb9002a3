"""Images with text calibrate the vision tower and the language model: rows, model inputs, packed patches."""

import pytest
import torch
import transformers as hf
from image_text import IMAGE, MODELS, made, pictures, processor, rows

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.data.batches import as_batch, batch_size, unpack
from optimum_moonshot.model.losses import IGNORED, labels_of


def prune(name, data, model=None, with_processor=None, **changes):
    config = MoonshotConfig(**{"pattern": "2:4", "lam": 0.9, "num_samples": 4, "batch_size": 2, **changes})
    pruner = MoonshotPruner(model or made(name), config, processor=with_processor or processor(name))
    return pruner, pruner.prune(data, progress=False)


def parts(report):
    return {"visual" if "vis" in layer.name else "text" for layer in report.layers}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_images_with_text_calibrate_the_tower_too(name, lam):
    pruner, report = prune(name, rows(), lam=lam)
    assert parts(report) == {"visual", "text"} and report.sparsity == 0.5
    assert not any("reached" in reason for reason in report.skipped.values())
    for layer in report.layers:
        weight = pruner.model.get_submodule(layer.name).weight
        assert (weight.reshape(len(weight), -1, 4) != 0).sum(-1).max() <= 2, layer.name
        assert (layer.fisher is not None) == (lam < 1)
    assert any("images with text" in note for note in report.notes)


def test_a_parquet_file_and_messages_are_rows_too(tmp_path):
    chat = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a picture"}]
    recorder = processor("llava")
    table = rows(messages=[chat] * 5)
    _, report = prune("llava", table, with_processor=recorder)
    assert recorder.shown[0] == "<image>what is it?|a picture" and parts(report) == {"visual", "text"}
    turns = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "a picture"}]
    other = processor("llava")
    prune("llava", rows(conversations=[turns] * 5), with_processor=other)
    assert other.shown == recorder.shown
    table.to_parquet(tmp_path / "rows.parquet")
    _, again = prune("llava", str(tmp_path / "rows.parquet"))
    assert [layer.loss for layer in again.layers] == [layer.loss for layer in report.layers]


@pytest.mark.parametrize("name", MODELS)
def test_model_inputs_give_the_same_losses_as_rows(name):
    prepare, table = processor(name), rows(4)
    items = [prepare([row["image"]], [f"<image>{row['text']}"], "pt") for row in table]
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    _, report = prune(name, [items[i] for i in order])
    _, expected = prune(name, table)
    assert [layer.loss for layer in report.layers] == [layer.loss for layer in expected.layers]


def test_packed_patches_are_split_by_sample():
    prepare = processor("qwen2_vl")
    items = [prepare([image], ["<image>abcdef"], "pt") for image in pictures(4)]
    together = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    single = [part for part in unpack(as_batch(together, "item 0", False), "item 0")]
    assert len(single) == 4 and all(batch_size(part) == 1 for part in single)
    for part, item in zip(single, items, strict=True):
        assert all(torch.equal(part[name], item[name]) for name in item)
    _, report = prune("qwen2_vl", [together])
    _, expected = prune("qwen2_vl", items)
    assert [layer.loss for layer in report.layers] == [layer.loss for layer in expected.layers]
    together["image_grid_thw"] = together["image_grid_thw"][:2]
    with pytest.raises(MoonshotError, match="image_grid_thw has 2 rows for 4 samples.*one sample at a time"):
        prune("qwen2_vl", [together])


def test_padded_texts_with_images_are_split_into_single_samples():
    """The vision tower has no padding mask: its inputs do not show where the text is padded."""
    prepare = processor("llava")
    items = [prepare([image], ["<image>" + "ab" * (3 + i)], "pt") for i, image in enumerate(pictures(4))]
    longest = max(item["input_ids"].shape[1] for item in items)
    padded = {"pixel_values": torch.cat([item["pixel_values"] for item in items])}
    for name in ("input_ids", "attention_mask"):
        wide = [torch.nn.functional.pad(item[name], (0, longest - item[name].shape[1])) for item in items]
        padded[name] = torch.cat(wide)
    _, report = prune("llava", [padded])
    _, expected = prune("llava", items, batch_size=1)
    assert any("one sample at a time: the inputs of" in note for note in report.notes)
    for layer, other in zip(report.layers, expected.layers, strict=True):
        assert layer.loss == pytest.approx(other.loss, rel=1e-5)


def test_placeholders_are_not_labels():
    ids = torch.tensor([[IMAGE, IMAGE, 5, 6]])
    assert labels_of(made("llava"), {"input_ids": ids}).tolist() == [[IGNORED, 5, 6, IGNORED]]


def test_rows_that_are_too_long_are_dropped():
    texts = ["ab", "x" * 80, "abcd", "ab", "abc"]
    _, report = prune("llava", rows(text=texts))
    assert "1 rows of more than 64 tokens left out" in report.notes
    with pytest.raises(MoonshotError, match="num_samples=4: .* has 0 rows, 5 more are longer than 3 tokens"):
        prune("llava", rows(), sequence_length=3)


def test_a_missing_processor_or_tokenizer_is_named():
    config = MoonshotConfig(pattern="2:4", num_samples=4)
    with pytest.raises(MoonshotError, match="processor: .* has images and text, which need the model's processor"):
        MoonshotPruner(made("llava"), config).prune(rows(), progress=False)
    broken = rows().add_column("other", [1] * 5).rename_column("image", "picture")
    with pytest.raises(MoonshotError, match="tokenizer=None"):
        MoonshotPruner(made("llava"), config).prune(broken.remove_columns("picture"), progress=False)


def test_the_processor_beside_a_model_is_loaded_and_saved(tmp_path, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    model = made("llava")
    model.resize_token_embeddings(len(tokenizer))
    model.config.image_token_index = model.config.image_token_id = tokenizer.image_token_id
    size = {"height": 8, "width": 8}
    pictures_to_pixels = hf.CLIPImageProcessorPil(size=size, crop_size=size)
    options = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    real = hf.LlavaProcessor(pictures_to_pixels, tokenizer, **options)
    model.save_pretrained(tmp_path / "dense")
    real.save_pretrained(tmp_path / "dense")
    pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", MoonshotConfig(pattern="2:4", num_samples=4))
    assert type(pruner.processor).__name__ == "LlavaProcessor"
    report = pruner.prune(rows(), progress=False)
    assert parts(report) == {"visual", "text"}
    pruner.save_pretrained(tmp_path / "pruned")
    assert type(hf.AutoProcessor.from_pretrained(tmp_path / "pruned")).__name__ == "LlavaProcessor"
