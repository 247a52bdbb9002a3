"""Data with labels on some tokens: masked prompts, padding on the left, and samples without any label."""

import pytest
import torch
from models import make, token_batches
from training_runs import trainer

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.data.batches import IGNORED, PROBE_TOKENS, shorten
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.losses import sample_losses

LENGTH = 32


def sample(seed, length=LENGTH):
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(seed))


def prompted(masked, count=4):
    """Samples whose first tokens, a number for each, have no label."""
    batches = []
    for seed, hidden in zip(range(count), masked if isinstance(masked, tuple) else (masked,) * count, strict=True):
        labels = sample(seed).clone()
        labels[:, :hidden] = IGNORED
        batches.append({"input_ids": sample(seed), "labels": labels})
    return batches


def padded(pads, count=4):
    batches = []
    for seed in range(count):
        mask = torch.ones(1, LENGTH, dtype=torch.int64)
        mask[:, :pads] = 0
        batches.append({"input_ids": sample(seed), "attention_mask": mask})
    return batches


def joined(batches):
    """The samples of two items in one."""
    return [
        {name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]


def prune(data, model=None, call="prune", arguments=(), **changes):
    settings = {"solver": "wanda", "pattern": "2:4", "num_samples": 4, "batch_size": 2, **changes}
    pruner = MoonshotPruner(model or make("llama"), MoonshotConfig(**settings))
    return getattr(pruner, call)(data, *arguments)


DATA = {
    "masked": prompted(20),
    "masked, two at a time": joined(prompted((3, 30, 16, 20))),
    "all but one": prompted(LENGTH - 1),
    "padded on the left": padded(20),
    "two at a time": joined(padded(20)),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("lam", [None, 1.0])
def test_a_run_reads_data_with_few_labels(name, lam):
    report = prune(DATA[name], lam=lam)
    assert report.sparsity == 0.5 and report.calibration["num_samples"] == 4
    assert all((layer.fisher is not None) == (lam is None) for layer in report.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked, two at a time", "two at a time"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rotation": "learned", "rotation_steps": 2},
        {"allocation": "fisher", "pattern": "unstructured", "sparsity": 0.5},
        {"recover": "distill", "recover_steps": 2},
        {"recover": "blockwise", "recover_steps": 2, "recompute": True},
        {"call": "sweep"},
        {"call": "plan"},
    ],
    ids=str,
)
def test_every_kind_of_run_does(name, changes):
    assert prune(DATA[name], **changes) is not None


@pytest.mark.parametrize("name", ["masked", "two at a time"])
def test_a_run_with_offloaded_blocks_does(tmp_path, name):
    make("llama").save_pretrained(tmp_path)
    config = MoonshotConfig(solver="wanda", pattern="2:4", num_samples=4, batch_size=2)
    pruner = MoonshotPruner.from_pretrained(tmp_path, config, offload="disk")
    assert pruner.prune(DATA[name], progress=False).sparsity == 0.5


def test_a_callback_does(tmp_path):
    rows = [{name: tensor[0] for name, tensor in item.items()} for item in prompted((20,) * 6 + (LENGTH,) * 2, 8)]
    callback = MoonshotCallback(MoonshotConfig(solver="wanda", pattern="2:4", num_samples=6, batch_size=2))
    trainer(tmp_path, make("llama"), callback, data=rows, max_steps=1).train()
    assert callback.report.sparsity == 0.5
    assert any("without a label left out" in note for note in callback.report.notes)


@torch.no_grad()
def test_a_sample_has_the_loss_that_it_has_without_its_padding():
    model = make("llama")
    for batch in (padded(20)[0], padded(1)[0]):
        visible = batch["attention_mask"][0].bool()
        alone = {"input_ids": batch["input_ids"][:, visible]}
        first, second = (sample_losses(model, run_model(model, each), each) for each in (batch, alone))
        assert torch.allclose(first, second, rtol=1e-4)


@pytest.mark.parametrize("lam", [None, 1.0])
def test_samples_without_a_label_are_left_out(lam):
    """Whatever λ, so that those of a sweep have the same samples."""
    data = prompted((20, LENGTH, 3, LENGTH, 0, 16), 6)
    report = prune(data, lam=lam)
    assert "2 samples without a label left out" in report.notes
    assert report.loss == prune([data[i] for i in (0, 2, 4, 5)], lam=lam).loss
    pairs = prune(joined(data), lam=lam)
    assert pairs.calibration["num_samples"] == 4 and "2 samples without a label left out" in pairs.notes
    with pytest.raises(
        MoonshotError, match="num_samples=4: the data has 3 samples with a label, and 2 without; give mo"
    ):
        prune(data[:5], lam=lam)
    with pytest.raises(MoonshotError, match="the data has 0 samples with a label, and 4 without"):
        prune(prompted(LENGTH), lam=lam)
    plan = prune(data, call="plan", lam=lam)
    assert plan.data["num_samples"] == 4


def test_labels_of_a_loss_may_mean_anything():
    def loss(output, batch):
        return output.logits.float().square().mean((1, 2))

    settings = MoonshotConfig(solver="wanda", pattern="2:4", num_samples=4, batch_size=2)
    report = MoonshotPruner(make("llama"), settings).prune(prompted(LENGTH), loss=loss, progress=False)
    assert report.calibration["num_samples"] == 4


def test_probes_are_short_and_keep_a_label_of_each_sample():
    full = token_batches()[0]
    assert shorten({"input_ids": sample(0)})["input_ids"].shape == (1, PROBE_TOKENS)
    assert shorten(full)["input_ids"].shape[1] == min(PROBE_TOKENS, full["input_ids"].shape[1])
    for masked in range(1, LENGTH):
        (probe,) = {shorten(prompted(masked)[0])["labels"].shape[1]}
        assert probe == min(LENGTH, masked + PROBE_TOKENS - 1)
        assert (shorten(prompted(masked)[0])["labels"] != IGNORED).sum() == min(LENGTH - masked, PROBE_TOKENS - 1)
    both = joined(prompted((2, 9), 2))[0]
    assert shorten(both)["input_ids"].shape == (1, 17) and shorten(both, samples=2)["input_ids"].shape == (2, 24)
    classes = {"input_ids": sample(0), "labels": torch.tensor([1])}
    assert shorten(classes, tokens=4) == classes
