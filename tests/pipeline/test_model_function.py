"""A run resumes only with the same function of the model: its code, its modules' attributes, `forward` and `loss`."""

from functools import partial

import pytest
import torch
from llama_runs import assert_same, weights
from models import make, token_batches
from offloaded_models import offloaded
from torch.nn.functional import cross_entropy

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.approximate import approximate, same_text
from optimum_moonshot.model.losses import labels_of

TAKEN_OVER = "21 layers were reused from an interrupted run"
SET_ASIDE = "an unfinished run was set aside until this one is done: the model's function differs in "


def weighted(power, output, batch):
    """The cross-entropy, with later tokens weighted more."""
    labels = labels_of(make("llama"), batch)
    losses = cross_entropy(output.logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses * torch.arange(1, labels.shape[1] + 1) ** power).mean(1)


def scaled(factor, model, batch):
    output = model(**batch, use_cache=False)
    output.logits = output.logits * factor
    return output


def sharper(factor, model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= factor


def prune(folder, model=None, attributes=1, lam=0.5, **functions):
    model = make("llama") if model is None else model
    sharper(attributes, model)
    config = MoonshotConfig(sparsity=0.6, lam=lam, num_samples=6, sequence_length=12, batch_size=2)
    pruner = MoonshotPruner(model, config)
    return pruner, pruner.prune(token_batches(), progress=False, resume_dir=folder, **functions).notes


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({"loss": partial(weighted, 0)}, {"loss": partial(weighted, 1)}, "losses"),
        ({}, {"loss": partial(weighted, 0)}, "losses"),
        ({}, {"forward": partial(scaled, 2)}, "outputs"),
        ({}, {"attributes": 3}, "outputs"),
    ],
)
def test_a_run_resumes_only_with_the_same_function(first, second, differs, tmp_path):
    one, _ = prune(tmp_path / "run", **first)
    other, notes = prune(tmp_path / "run", **second)
    assert SET_ASIDE + differs in notes and not any("reused" in note for note in notes)
    assert_same(other.model, weights(prune(None, **second)[0].model))
    again, notes = prune(tmp_path / "run", **first)
    assert any(TAKEN_OVER in note for note in notes)
    assert_same(again.model, weights(one.model))


def test_a_run_resumes_with_another_number_of_threads(tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            notes = prune(tmp_path / "run")[1]
    finally:
        torch.set_num_threads(before)
    assert any(TAKEN_OVER in note for note in notes)


def test_outputs_are_the_same_up_to_rounding():
    text = approximate([3.0, -4.0], 1e-3)
    assert same_text(text, approximate([3.002, -4.002], 1e-3)) and same_text(text, text)
    assert not same_text(text, approximate([3.02, -4.02], 1e-3)) and not same_text(text, approximate([3.0], 1e-3))
    assert not same_text(text, approximate([3.0, -4.0], 1e-2)) and not same_text(text, None)
    assert same_text(approximate([0.0], 1e-3), approximate([0.0], 1e-3)) and same_text(None, None)
    assert not same_text("float32: 1", "float32: 1.0")


def test_random_outputs_are_compared_by_the_same_random_numbers(tmp_path):
    def noisy(model, batch):
        output = model(**batch, use_cache=False)
        output.logits = output.logits + torch.randn(()) * output.logits.sign()
        return output

    for seed in (0, 1):
        torch.manual_seed(seed)
        notes = prune(tmp_path / "run", forward=noisy)[1]
    assert any(TAKEN_OVER in note for note in notes)


def test_a_run_of_an_offloaded_model_resumes_only_with_the_same_function(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")

    def run(attributes, offload="disk"):
        pruner = offloaded(tmp_path / "dense", lam=0.5)
        if offload is None:
            pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", pruner.config)
        sharper(attributes, pruner.model)
        return pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run").notes

    run(1)
    assert SET_ASIDE + "outputs" in run(3)
    assert any(TAKEN_OVER in note for note in run(3))
    assert any(TAKEN_OVER in note for note in run(1, offload=None))


def test_a_model_writes_its_samples_again_after_its_function_changed(tmp_path):
    def run(attributes):
        model = make("llama")
        sharper(attributes, model)
        pruner = MoonshotPruner(model, MoonshotConfig(sparsity=0.5, num_samples=4, sequence_length=12, batch_size=2))
        return pruner.prune("self", progress=False, resume_dir=tmp_path / "run").notes

    taken_over = "the generated samples were reused from an interrupted run"
    run(1)
    assert taken_over in run(1)
    assert taken_over not in run(3)


@pytest.mark.parametrize("offload", [None, "disk"])
def test_a_variant_of_a_sweep_is_taken_over_by_a_sweep_at_its_lambda(offload, tmp_path):
    """At λ = 1 alone no losses are needed, so that fewer samples are probed, without a caller's loss."""
    make("llama").save_pretrained(tmp_path / "dense")

    def sweep(*lambdas):
        config = MoonshotConfig(sparsity=0.6, num_samples=6, sequence_length=12, batch_size=2)
        pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", config, offload=offload)
        options = dict(work_dir=tmp_path / "work", loss=partial(weighted, 1), metric=lambda model: 1.0, progress=False)
        report = pruner.sweep(token_batches(), lambdas=lambdas, **options)
        pruner.choose(report.entries[-1])
        return pruner.report.notes

    sweep(0.5, 1.0)
    again = sweep(1.0)
    assert not any("set aside" in note for note in again) and any(TAKEN_OVER in note for note in again)


def test_a_loss_is_not_called_where_none_is_needed(tmp_path):
    """It may need labels, which data do not have then."""

    def labelled(output, batch):
        return batch["labels"]

    for _ in range(2):
        notes = prune(tmp_path / "run", lam=1, loss=labelled)[1]
    assert any(TAKEN_OVER in note for note in notes)
