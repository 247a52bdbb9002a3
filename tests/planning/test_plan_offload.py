"""Plans of models whose decoder layers are elsewhere: one of them at a time, results on disk, and the reading."""

import argparse

import pytest
import torch
import transformers as hf
from models import EDGE, GROUPED, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.commands.moonshot import add_prune_options
from optimum_moonshot.commands.moonshot import prune as prune_command
from optimum_moonshot.model.offload import Offloaded, is_offloaded
from optimum_moonshot.planning.footprint import LiveBytes
from optimum_moonshot.reports.plan import DISK

FAST = dict(pattern="2:4", num_samples=8, batch_size=4, sequence_length=16)


def saved(folder, name="llama", **changes):
    torch.manual_seed(0)
    made = hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, **changes})) if changes else make(name)
    made.save_pretrained(folder)
    return folder


def opened(folder, offload="disk", **fields):
    return MoonshotPruner.from_pretrained(folder, MoonshotConfig(**{**FAST, **fields}), offload=offload)


def item(plan, what, place="cpu"):
    return max(moment.items.get(what, {}).get(place, 0) for moment in plan.snapshots)


@pytest.mark.parametrize("lam", [1.0, 0.5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_it_is_the_plan_in_memory_but_for_where_weights_and_results_are(name, lam, tmp_path):
    folder = saved(tmp_path / "dense", name)
    there, away = (opened(folder, place, lam=lam).plan() for place in (None, "disk"))
    assert [(b.name, b.rounds, b.passes) for b in away.blocks] == [(b.name, b.rounds, b.passes) for b in there.blocks]
    sizes = {block: 0 for block in (each.name for each in away.blocks)}
    for parameter, tensor in make(name).state_dict().items():
        for block in sizes:
            sizes[block] += tensor.nbytes * parameter.startswith(f"{block}.")
    assert item(away, "weights of a block") == max(sizes.values())
    assert away.model["offloaded"] == {"largest": max(sizes.values()), "total": sum(sizes.values()), "place": DISK}
    for what in ("statistics", "solver"):
        assert item(away, what) == item(there, what)
    assert item(away, "results") == 0 < item(away, "results", DISK) < item(there, "results")
    assert away.seconds["reading"] > 0 and "reading" not in there.seconds
    assert "offloaded to files, onloaded block by block" in str(away)


@pytest.mark.parametrize(
    "fields", [{"lam": 1.0}, {"lam": 0.5}, {"lam": 0.5, "rotation": "learned", "rotation_steps": 2}], ids=str
)
def test_what_is_planned_is_what_lives(fields, tmp_path):
    pruner = opened(saved(tmp_path / "dense"), **fields)
    batches = token_batches(samples=8, length=24)
    plan = pruner.plan(batches)
    with LiveBytes() as live:
        pruner.prune(batches, progress=False)
    said = plan.peaks["cpu"] - item(plan, "allocator")
    assert 0.6 * live.peak <= said <= 1.7 * live.peak, said / live.peak


def test_it_reads_a_block_of_each_kind_and_leaves_the_model_as_it_was(tmp_path):
    pruner = opened(saved(tmp_path / "dense", num_hidden_layers=24), lam=0.5)
    model = pruner.model
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    before = Offloaded.read
    plan = pruner.plan()
    assert Offloaded.read - before <= plan.model["offloaded"]["total"] / 4
    assert is_offloaded(model)
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if ".layers." in name)
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()


def test_a_rotation_brings_one_block_at_a_time_and_keeps_what_it_changes(tmp_path):
    folder = saved(tmp_path / "dense")
    turned, plain = (opened(folder, **how).plan() for how in ({"rotation": "learned", "rotation_steps": 2}, {}))
    for plan in (turned, plain):
        assert item(plan, "weights of a block") == plan.model["offloaded"]["largest"]
    assert turned.peaks["disk"] - plain.peaks["disk"] == turned.model["offloaded"]["total"]
    assert turned.seconds["reading"] > 5 * plain.seconds["reading"]


@pytest.mark.slow
def test_a_model_too_large_for_its_device_fits_with_its_layers_elsewhere():
    shape = {**GROUPED, "hidden_size": 64, "num_hidden_layers": 30, "architectures": ["LlamaForCausalLM"]}
    config, settings = hf.LlamaConfig(**shape), MoonshotConfig(**FAST, solver="wanda", lam=1.0)

    def planned(device, offload=None, host="1GiB"):
        machine = {"device_memory": device, "host_memory": host}
        return MoonshotPruner.plan_for(config, settings, **machine, offload=offload)

    generous = planned("80GB", "disk")
    held, away = generous.model["bytes"], generous.model["offloaded"]["total"]
    small = held - away + generous.peaks["cuda"]
    assert small < held
    refused = planned(small)
    assert not refused.fits and 'offload="cpu" or "disk"' in refused.overflows[0].hint
    assert planned(small, "cpu").fits and planned(small, "disk").fits
    assert not planned(small - 1, "disk").fits
    poor = planned(small, "cpu", host=away // 2)
    assert 'offload="disk"' in [misfit.hint for misfit in poor.overflows if misfit.where == "the model's layers"]


def test_what_cannot_be_says_so(tmp_path):
    config, settings = hf.LlamaConfig(**GROUPED), MoonshotConfig(**FAST)
    with pytest.raises(MoonshotError, match="offload='ram'"):
        MoonshotPruner.plan_for(config, settings, offload="ram")
    with pytest.raises(MoonshotError, match="device_memory"):
        MoonshotPruner.plan_for(config, settings, offload="cpu")
    sizes = dict(vocab_size=96, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, **EDGE)
    hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    batches = [{**batch, "labels": batch["input_ids"]} for batch in token_batches()]
    with pytest.raises(MoonshotError, match="no chain"):
        opened(tmp_path / "t5", num_samples=6, lam=1.0).plan(batches)


def test_the_command_plans_it(tmp_path, capsys):
    saved(tmp_path / "dense")
    parser = argparse.ArgumentParser()
    add_prune_options(parser)
    options = ["--output", str(tmp_path / "out"), "--pattern", "2:4", "--dry-run", "--offload", "disk"]
    prune_command(parser.parse_args([str(tmp_path / "dense"), *options, "--num-samples", "4"]))
    told = capsys.readouterr().out
    assert "reading" in told and "offloaded to files, onloaded block" in told
    assert not (tmp_path / "out").exists()
