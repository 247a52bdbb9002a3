"""Models whose inputs need care: encoder-decoders on text, heads without a pad token; adapters and tokenizers that
are no model's."""

import json

import pytest
import torch
import transformers as hf
from command_line import failure
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, load_pruned, verify
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.model_info import load_tokenizer

SETTINGS = dict(solver="wanda", pattern="2:4", num_samples=4, sequence_length=12, batch_size=2)
EDGE = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXTS = ["some text that is long enough for a window"] * 3 + ["short one"] * 3


def t5():
    config = hf.T5Config(
        vocab_size=96, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config).eval()


def bart():
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = hf.BartConfig(vocab_size=96, d_model=16, encoder_layers=2, decoder_layers=2, **heads, **EDGE)
    return hf.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("family", [t5, bart])
@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.parametrize("source", ["texts", "tokens"])
def test_an_encoder_decoder_reproduces_its_text(tokenizer, family, lam, source):
    data = TEXTS if source == "texts" else [{"input_ids": batch["input_ids"]} for batch in token_batches()]
    report = MoonshotPruner(family(), MoonshotConfig(lam=lam, **SETTINGS), tokenizer).prune(data, progress=False)
    assert {layer.name.removeprefix("model.").split(".")[0] for layer in report.layers} == {"encoder", "decoder"}
    assert "the decoder's labels are the text that the encoder reads" in report.notes


def test_labels_that_are_given_stay():
    batches = [{**batch, "labels": batch["input_ids"].flip(1)} for batch in token_batches()]
    report = MoonshotPruner(t5(), MoonshotConfig(lam=0.9, **SETTINGS)).prune(batches, progress=False)
    assert not any("decoder's labels" in note for note in report.notes)


def reward(labels=2):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, num_labels=labels,
    )  # fmt: skip
    return hf.LlamaForSequenceClassification(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_head_without_a_pad_token_reads_each_sample_as_alone(side):
    model = reward()
    ids = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 7, 3)) if side else ():
        mask[row, slice(0, 12 - length) if side == "left" else slice(length, 12)] = 0
    batch = {"input_ids": ids, **({"attention_mask": mask} if side else {})}
    together = run_model(model, batch).logits
    alone = [model(input_ids=row[None, keep.bool()]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)
    single = run_model(model, {name: tensor[1:2] for name, tensor in batch.items()}).logits
    assert torch.allclose(single, together[1:2], atol=1e-5)
    assert model.config.pad_token_id is None and torch.equal(batch["input_ids"], ids)


@pytest.mark.parametrize("changes", [{}, {"lam": 1.0}, {"pattern": "structured", "sparsity": 0.5, "solver": "osscar"}])
def test_a_head_without_a_pad_token_is_pruned(changes):
    batches = [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 2} for batch in token_batches()]
    report = MoonshotPruner(reward(), MoonshotConfig(**{**SETTINGS, **changes})).prune(batches, progress=False)
    assert report.sparsity > 0.4 and not any("one sample" in note for note in report.notes)


def adapter(folder):
    folder.mkdir()
    settings = {"base_model_name_or_path": "someone/model", "peft_type": "LORA", "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_an_adapter_is_no_model(tmp_path, capsys):
    folder = adapter(tmp_path / "adapter")
    config = MoonshotConfig(**SETTINGS)
    message = f"{folder} is a PEFT adapter of someone/model, not a model; merge the two, and give the result"
    for load in (
        lambda: MoonshotPruner.from_pretrained(folder, config),
        lambda: MoonshotPruner.from_pretrained(folder, config, offload="disk"),
        lambda: MoonshotPruner.plan_for(str(folder), config),
        lambda: load_pruned(folder),
        lambda: verify(folder),
    ):
        with pytest.raises(MoonshotError) as caught:
            load()
        assert str(caught.value).startswith(message)
    text = tmp_path / "a.txt"
    text.write_text("some text")
    for command in (["prune", folder, "--output", tmp_path / "out"], ["eval", folder, "--dataset", text]):
        _, lines = failure(capsys, *command, *(["--sparsity", "0.5"] if command[0] == "prune" else []))
        assert message in lines[-1]


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "esm", "t5", "mbart", "deberta-v2", "llama"])
def test_a_folder_without_a_tokenizer_has_none(tmp_path, kind):
    """Some classes of transformers raise a TypeError there, others have a vocabulary of no text."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert load_tokenizer(tmp_path) is None


def test_eval_of_a_model_without_a_tokenizer(tmp_path, capsys):
    make("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("some text")
    _, lines = failure(capsys, "eval", tmp_path / "model", "--dataset", tmp_path / "a.txt")
    assert "perplexity of text needs the model's tokenizer; pass it, or save it in the model's folder" in lines[-1]
