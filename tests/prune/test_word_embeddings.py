"""Word embeddings and heads of quantized models: which they are, their rounding, and their bytes in reports."""

import pytest
import torch
import transformers as hf
from checkpoints import tensors
from models import TEXT, make, spread, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.__main__ import main
from optimum_moonshot.model import word_embeddings as module
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.word_embeddings import rounded_to, word_embeddings
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.reports.prune_report import PruneReport
from optimum_moonshot.reports.record import PruningRecord

SETTINGS = dict(solver="magnitude", pattern="2:4", bits=4, quant_group=64)
SIZES = dict(num_samples=6, sequence_length=12, batch_size=2)


def prune(model, **settings):
    pruner = MoonshotPruner(model, MoonshotConfig(**{**SETTINGS, **settings}))
    pruner.prune(progress=False)
    return pruner


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_rounding_error_is_at_most_that_of_the_widest_grid(bits, dtype):
    """Half of a step, for the scale that maps the largest weight of a group to the last code."""
    weight = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    grid = Grid(bits, 64)
    rounded = rounded_to(grid, weight)
    assert rounded.dtype == dtype
    exact = grid.with_dtype(dtype)
    exact.scales_of(rounded)  # raises off the grid
    steps = exact.blocks(weight.float()).abs().amax(-1) / grid.top
    resolution = torch.finfo(dtype).eps * weight.float().abs().max()  # of scale and value
    bound = exact.per_weight((steps / 2).square(), 200)
    error = (rounded.float() - weight.float()).square()
    sums = exact.blocks(error).sum(-1)
    assert (sums <= exact.blocks(bound + resolution**2 + bound.sqrt() * 2 * resolution).sum(-1)).all()
    assert torch.equal(rounded_to(grid, rounded), rounded)
    assert torch.equal(rounded_to(grid, rounded[:3]), rounded[:3])


def test_wrong_scales_would_lose_more():
    """The search beats the widest grid where a row has an outlier."""
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 6
    grid = Grid(4, 64)
    widest = grid.rounded(weight, grid.blocks(weight).abs().amax(-1) / grid.top)
    error = (rounded_to(grid, weight) - weight).square().sum()
    assert error < 0.9 * (widest - weight).square().sum()


def t5():
    sizes = dict(vocab_size=96, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return spread(hf.T5ForConditionalGeneration(hf.T5Config(**sizes)))


EXPECTED = {
    "llama": ["model.embed_tokens.weight", "lm_head.weight"],
    "llama-tied-biased": ["model.embed_tokens.weight"],
    "gpt2": ["transformer.wte.weight"],  # and not the positions
    "opt": ["model.decoder.embed_tokens.weight"],
    "bert": ["bert.embeddings.word_embeddings.weight"],
    "t5": ["shared.weight"],
    "vit": [],
    "convnet": [],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_which_weights_are_rounded(name):
    model = t5() if name == "t5" else make(name)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    report = prune(model, quant_group=64).report
    layers = {f"{layer.name}.weight" for layer in report.layers}
    others = {key: parameter for key, parameter in model.named_parameters() if key not in layers}
    changed = {key for key, parameter in others.items() if not torch.equal(parameter, before[key])}
    assert changed == set(EXPECTED[name])
    for key in changed:
        assert torch.equal(others[key], rounded_to(Grid(8, 64), before[key]))
    assert report.embedding_bits == (8 if changed else None)
    assert ("word embeddings in 8 bits" in report.table()) == bool(changed)
    record = PruningRecord.of(model)
    assert record is None or record.embedding_bits == report.embedding_bits
    assert PruneReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize(
    "settings, bits",
    [
        (dict(embedding_bits=4), 4),
        (dict(embedding_bits=16), None),
        (dict(embedding_bits=None), None),
        (dict(bits=None), None),
        (dict(bits=None, embedding_bits=16), None),
    ],
    ids=str,
)
def test_the_option(settings, bits, tmp_path):
    model = make("llama-tied-biased")
    before = model.get_input_embeddings().weight.detach().clone()
    pruner = prune(model, **settings)
    after = model.get_input_embeddings().weight
    assert torch.equal(after, before if bits is None else rounded_to(Grid(bits, 64), before))
    assert model.get_output_embeddings().weight is after and pruner.report.embedding_bits == bits
    assert PruningRecord.of(model).embedding_bits == bits
    pruner.save_pretrained(tmp_path, format="packed")
    stored = tensors(tmp_path)
    assert ("model.embed_tokens.weight" in stored) == (bits is None)
    if bits == 4:
        assert stored["model.embed_tokens.weight_codes"].numel() == 96 * 16 // 2


def test_a_selected_head_is_pruned_instead():
    model = make("llama")
    report = prune(model, targets=[r"\.[0-2]\.", "lm_head"]).report
    names = [embedding.name for embedding in word_embeddings(model, find_structure(model, ["lm_head"]).layers())]
    assert names == ["model.embed_tokens.weight"] and report.embedding_bits == 8
    assert (model.lm_head.weight == 0).float().mean() >= 0.5
    Grid(4, 64).scales_of(model.lm_head.weight)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "bert"])
def test_reported_bytes_are_those_of_the_files(name, tmp_path):
    pruner = prune(make(name).bfloat16())
    pruner.save_pretrained(tmp_path, format="packed")
    size = sum(tensor.nbytes for tensor in tensors(tmp_path).values())
    report = pruner.report
    assert report.model_bits_per_weight * report.parameters == pytest.approx(8 * size)
    card = (tmp_path / "README.md").read_text()
    assert report.bits_line in card and "bits of the word embeddings and the head | 8 |" in card
    assert "embedding_bits: 8" in card and f"packed: {size}" in card


def test_a_target_of_bytes_counts_rounded_embeddings(tmp_path):
    """Embeddings in 16 bits would exceed it."""
    sizes = dict(vocab_size=2048, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = spread(hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, **sizes})))
    budget = dict(pattern="unstructured", sparsity=None, allocation="fisher", bits=None, lam=1, **SIZES)
    target = 2048 * (16 + 4) + 60_000
    assert target < 2048 * 16 * 4
    config = MoonshotConfig(**{**SETTINGS, **budget}, target_bytes=target)
    pruner = MoonshotPruner(model, config)
    pruner.prune(token_batches(), progress=False)
    pruner.save_pretrained(tmp_path, format="packed")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0.7 * target < size <= target
    config = MoonshotConfig(**{**SETTINGS, **budget}, target_bytes=target, embedding_bits=16)
    again = spread(hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, **sizes})))
    with pytest.raises(MoonshotError, match="target_bytes=.*the smallest choices need.*embedding_bits=8"):
        MoonshotPruner(again, config).prune(token_batches(), progress=False)


def test_a_failure_restores_the_embeddings(monkeypatch):
    model = make("llama")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    rounded = module.rounded_to
    calls = []

    def failing(grid, weight):
        calls.append(weight)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return rounded(grid, weight)

    monkeypatch.setattr("optimum_moonshot.pipeline.selection.rounded_to", failing)
    with pytest.raises(KeyboardInterrupt):
        prune(model)
    assert len(calls) == 2
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_variants_of_a_path_have_rounded_embeddings():
    model = make("llama-tied-biased")
    dense = model.get_input_embeddings().weight.detach().clone()
    rounded = rounded_to(Grid(8, 64), dense)
    config = MoonshotConfig(**{**SETTINGS, "pattern": "unstructured", "solver": "obc"}, sparsity=0.5, **SIZES)
    path = MoonshotPruner(model, config).prune_path(token_batches(), [0.5, 0.7], progress=False)
    for sparsity in (0.5, 0.7):
        with path.applied(sparsity):
            assert torch.equal(model.get_input_embeddings().weight, rounded)
        assert torch.equal(model.get_input_embeddings().weight, dense)
    for sparsity in (0.7, 0.5):
        assert path.apply(sparsity).embedding_bits == 8
        assert torch.equal(model.get_input_embeddings().weight, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("recover", ["distill", "blockwise"])
def test_recovered_and_rotated_models_have_rounded_embeddings(recover, tmp_path):
    model = make("llama-tied-biased")
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2)
    settings = dict(solver="sparsegpt", recover=recover, recover_steps=2, rotation="learned", rotation_steps=2, lam=1)
    pruner = MoonshotPruner(model, MoonshotConfig(**{**SETTINGS, **settings}, **SIZES))
    pruner.prune(token_batches(), progress=False)
    embeddings = word_embeddings(model, find_structure(model).layers())
    assert len(embeddings) == 2  # a rotation unties the head
    for embedding in embeddings:
        Grid(8, 64).scales_of(embedding.matrix)
    pruner.save_pretrained(tmp_path, format="packed")
    assert {"lm_head.weight_codes", "model.embed_tokens.weight_codes"} <= tensors(tmp_path).keys()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(bits=4, embedding_bits=5), "embedding_bits=5: give 8, 4, or 16"),
        (dict(bits=4, embedding_bits=3), "embedding_bits=3"),
        (dict(bits=4, embedding_bits=True), "embedding_bits=True"),
        (dict(bits=4, embedding_bits="8"), "embedding_bits='8'"),
        (dict(bits=4, embedding_bits=8.0), "embedding_bits=8.0"),
        (dict(embedding_bits=4), "embedding_bits=4: only a model with quantized layers"),
    ],
    ids=str,
)
def test_wrong_values_are_errors(settings, message):
    with pytest.raises(MoonshotError) as error:
        MoonshotConfig(pattern="2:4", **settings)
    assert message in str(error.value)


def test_the_command_line_has_the_option(capsys):
    with pytest.raises(SystemExit):
        main(["prune", "--help"])
    assert "--embedding-bits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased"])
def test_offloaded_embeddings_are_rounded(name, tmp_path):
    make(name).save_pretrained(tmp_path / "dense")
    config = MoonshotConfig(**{**SETTINGS, "pattern": "unstructured", "solver": "obc"}, sparsity=0.5, **SIZES)
    for place in ("disk", None):
        pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", config, offload=place)
        path = pruner.prune_path(token_batches(), [0.5, 0.7], progress=False)
        with path.applied(0.7):
            pass
        path.apply(0.5)
        pruner.save_pretrained(tmp_path / str(place), format="packed")
    offloaded, resident = tensors(tmp_path / "disk"), tensors(tmp_path / "None")
    assert offloaded.keys() == resident.keys() and any("embed_tokens.weight_codes" in key for key in offloaded)
    assert all(torch.equal(offloaded[key], resident[key]) for key in resident)
