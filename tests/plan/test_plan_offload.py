"""Plans of offloaded models: one block in memory, results on disk, and the time to read weights."""

import argparse

import pytest
import torch
import transformers as hf
from models import EDGE, GROUPED, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.commands.moonshot import add_prune_options
from optimum_moonshot.commands.moonshot import prune as prune_command
from optimum_moonshot.model.offload import Offloaded
from optimum_moonshot.model.weights import is_offloaded
from optimum_moonshot.plan.report import DISK
from optimum_moonshot.plan.trials import LiveBytes

FAST = dict(pattern="2:4", num_samples=8, batch_size=4, sequence_length=16)


def saved(folder, name="llama", **changes):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, **changes})) if changes else make(name)
    model.save_pretrained(folder)
    return folder


def opened(folder, offload="disk", **fields):
    return MoonshotPruner.from_pretrained(folder, MoonshotConfig(**{**FAST, **fields}), offload=offload)


def peak(plan, item, place="cpu"):
    return max(snapshot.items.get(item, {}).get(place, 0) for snapshot in plan.snapshots)


@pytest.mark.parametrize("lam", [1.0, 0.5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_offloading_changes_only_where_weights_and_results_are(name, lam, tmp_path):
    folder = saved(tmp_path / "dense", name)
    in_memory, offloaded = (opened(folder, place, lam=lam).plan() for place in (None, "disk"))
    blocks = [[(b.name, b.rounds, b.passes) for b in plan.blocks] for plan in (in_memory, offloaded)]
    assert blocks[0] == blocks[1]
    sizes = {block: 0 for block in (each.name for each in offloaded.blocks)}
    for parameter, tensor in make(name).state_dict().items():
        for block in sizes:
            sizes[block] += tensor.nbytes * parameter.startswith(f"{block}.")
    assert peak(offloaded, "weights of a block") == max(sizes.values())
    assert offloaded.model["offloaded"] == {"largest": max(sizes.values()), "total": sum(sizes.values()), "place": DISK}
    for item in ("statistics", "solver"):
        assert peak(offloaded, item) == peak(in_memory, item)
    assert peak(offloaded, "results") == 0 < peak(offloaded, "results", DISK) < peak(in_memory, "results")
    assert offloaded.seconds["reading"] > 0 and "reading" not in in_memory.seconds
    assert "offloaded to files, onloaded block by block" in str(offloaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"lam": 1.0}, {"lam": 0.5}, {"lam": 0.5, "rotation": "learned", "rotation_steps": 2}], ids=str
)
def test_the_planned_peak_matches_the_run(fields, tmp_path):
    pruner = opened(saved(tmp_path / "dense"), **fields)
    batches = token_batches(samples=8, length=24, size=4)
    plan = pruner.plan(batches)
    with LiveBytes() as live:
        pruner.prune(batches, progress=False)
    estimate = plan.peaks["cpu"] - peak(plan, "allocator")
    assert 0.6 * live.peak <= estimate <= 1.7 * live.peak, estimate / live.peak


def test_a_plan_reads_one_block_of_each_kind_and_has_no_side_effects(tmp_path):
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


def test_a_rotation_onloads_one_block_at_a_time_and_stores_it_on_disk(tmp_path):
    folder = saved(tmp_path / "dense")
    rotated, plain = (opened(folder, **fields).plan() for fields in ({"rotation": "learned", "rotation_steps": 2}, {}))
    for plan in (rotated, plain):
        assert peak(plan, "weights of a block") == plan.model["offloaded"]["largest"]
    assert rotated.peaks["disk"] - plain.peaks["disk"] == rotated.model["offloaded"]["total"]
    assert rotated.seconds["reading"] > plain.seconds["reading"]


@pytest.mark.slow
def test_a_model_too_large_for_its_device_fits_with_offloaded_layers():
    shape = {**GROUPED, "hidden_size": 64, "num_hidden_layers": 30, "architectures": ["LlamaForCausalLM"]}
    config, settings = hf.LlamaConfig(**shape), MoonshotConfig(**FAST, solver="wanda", lam=1.0)

    def planned(device, offload=None, host="1GiB"):
        machine = {"device_memory": device, "host_memory": host}
        return MoonshotPruner.plan_for(config, settings, **machine, offload=offload)

    generous = planned("80GB", "disk")
    total, offloaded = generous.model["bytes"], generous.model["offloaded"]["total"]
    small = total - offloaded + generous.peaks["cuda"]
    assert small < total
    refused = planned(small)
    assert not refused.fits and 'offload="cpu" or "disk"' in refused.overflows[0].hint
    assert planned(small, "cpu").fits and planned(small, "disk").fits
    assert not planned(small - 1, "disk").fits
    poor = planned(small, "cpu", host=offloaded // 2)
    assert 'offload="disk"' in [overflow.hint for overflow in poor.overflows if overflow.where == "the model's layers"]


def test_an_unsupported_plan_is_an_error(tmp_path):
    config, settings = hf.LlamaConfig(**GROUPED), MoonshotConfig(**FAST)
    with pytest.raises(MoonshotError, match="offload='ram'"):
        MoonshotPruner.plan_for(config, settings, offload="ram")
    with pytest.raises(MoonshotError, match="device_memory"):
        MoonshotPruner.plan_for(config, settings, offload="cpu")
    sizes = dict(vocab_size=96, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, **EDGE)
    hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    batches = [{**batch, "labels": batch["input_ids"]} for batch in token_batches()]
    with pytest.raises(MoonshotError, match="not sequential"):
        opened(tmp_path / "t5", num_samples=6, lam=1.0).plan(batches)


def test_the_command_plans_an_offloaded_model(tmp_path, capsys):
    saved(tmp_path / "dense")
    parser = argparse.ArgumentParser()
    add_prune_options(parser)
    options = ["--output", str(tmp_path / "out"), "--pattern", "2:4", "--dry-run", "--offload", "disk"]
    prune_command(parser.parse_args([str(tmp_path / "dense"), *options, "--num-samples", "4"]))
    output = capsys.readouterr().out
    assert "reading" in output and "offloaded to files, onloaded block" in output
    assert not (tmp_path / "out").exists()
