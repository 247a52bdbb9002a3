"""Pruning a model whose decoder layers are on disk equals pruning it in memory, bit for bit."""

import copy
import gc
import json

import pytest
import torch
import transformers as hf
from marks import slow_but
from models import CAUSAL, EDGE, GROUPED, make, spread, token_batches
from offloaded_models import assert_equal, offloaded, settings, tensors
from packaging import version
from tiny_architectures import made

from optimum_moonshot import MoonshotPruner, load_pruned
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.layers import find_blocks, visited
from optimum_moonshot.model.offload import Offloaded
from optimum_moonshot.model.weights import is_offloaded, mark_written
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import select
from optimum_moonshot.prune import run as run_module


@pytest.fixture
def llama(tmp_path):
    """The folder of a model in several files."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    return tmp_path / "dense"


def both(folder, tmp_path, batches=None, **changes):
    """The pruners of a checkpoint pruned and saved in memory and offloaded, after comparing the files."""
    pruners = []
    for name, place in (("memory", None), ("offloaded", "disk")):
        pruner = MoonshotPruner.from_pretrained(folder, settings(**changes), offload=place)
        pruner.prune(batches or token_batches(), progress=False)
        pruner.save_pretrained(tmp_path / name)
        pruners.append(pruner)
    assert_equal(tmp_path / "offloaded", tmp_path / "memory")
    return pruners


FEW = ("gpt2", "bloom", "mixtral")  # the others take too long for every run


@pytest.mark.parametrize("name", slow_but(FEW, CAUSAL))
def test_every_architecture(name, tmp_path):
    make(name).save_pretrained(tmp_path / "dense")
    in_memory, on_disk = both(tmp_path / "dense", tmp_path, lam=0.9)
    assert is_offloaded(on_disk.model) and not is_offloaded(in_memory.model)
    assert on_disk.report.notes == [*in_memory.report.notes, "blocks stayed on disk: one at a time was onloaded"]
    for format in ("dense", "packed"):
        for pruner, folder in ((in_memory, "a"), (on_disk, "b")):
            pruner.save_pretrained(tmp_path / folder / format, format=format)
        assert_equal(tmp_path / "b" / format, tmp_path / "a" / format)
    load_pruned(tmp_path / "b" / "packed")  # verifies the checkpoint


CHANGES = [
    {"lam": 1.0},
    {"solver": "wanda", "lam": 1.0},
    {"solver": "obc", "lam": 0.5, "pattern": "unstructured", "sparsity": 0.5},
    {"solver": "alps", "lam": 0.5, "pattern": "unstructured", "sparsity": 0.5, "allocation": "fisher"},
    {"lam": 1.0, "pattern": "unstructured", "sparsity": 0.5, "allocation": "owl"},
    {"lam": 0.5, "fisher_layers": "attention", "targets": [r"layers\.1\."]},
    {"lam": 1.0, "targets": [r"layers\.[12]\."]},
    {"lam": 0.9, "targets": [r"layers\.2\.", "lm_head"]},
    {"lam": 1.0, "recompute": True},
    {"lam": 0.5, "recompute": True},
    {"lam": 0.5, "recover": "blockwise", "recover_steps": 3},
    {"lam": 1.0, "recover": "gradual", "recover_steps": 3},
    {"lam": 1.0, "solver": "osscar", "pattern": "structured", "sparsity": 0.5, "recover": "blockwise"},
    {"lam": 1.0, "recover": "distill", "recover_steps": 3},
    {"lam": 0.5, "rotation": "learned", "rotation_steps": 3},
    {"solver": "osscar", "pattern": "structured", "sparsity": 0.25, "lam": 0.9},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_kind_of_run(changes, llama, tmp_path):
    both(llama, tmp_path, **changes)


def test_padded_samples_that_cannot_be_separated(tmp_path):
    make("mixtral").save_pretrained(tmp_path / "dense")
    pruners = both(tmp_path / "dense", tmp_path, token_batches(padded=True), lam=0.9)
    for pruner in pruners:
        assert any("one sample at a time" in note for note in pruner.report.notes)


@pytest.mark.parametrize(("lam", "times"), [(1.0, 2), (0.9, 4)])
def test_every_weight_is_read_a_fixed_number_of_times_and_one_layer_is_onloaded(
    lam, times, llama, onloads, monkeypatch
):
    monkeypatch.setattr(Offloaded, "read", 0)
    pruner = offloaded(llama, lam=lam)
    pruner.prune(token_batches(), progress=False)
    inside = sum(p.nbytes for _, block in find_blocks(make("llama")) for p in block.parameters())
    assert Offloaded.read == times * inside and onloads.most == 1 and not onloads.present


def test_the_model_runs_after_a_failed_and_after_a_completed_run(llama, monkeypatch, tmp_path):
    ids = torch.arange(10)[None]
    pruner = offloaded(llama)
    before = pruner.model(ids).logits
    wanted = {name: parameter.requires_grad for name, parameter in pruner.model.named_parameters()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module.Variant, "report", fail)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "prune_layers", fail)
        with pytest.raises(KeyboardInterrupt):
            pruner.prune(token_batches(), progress=False)
    assert torch.equal(pruner.model(ids).logits, before)
    assert {name: parameter.requires_grad for name, parameter in pruner.model.named_parameters()} == wanted
    monkeypatch.undo()
    pruner.prune(token_batches(), progress=False)
    pruner.save_pretrained(tmp_path / "pruned")
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")(ids).logits
    assert torch.equal(pruner.model(ids).logits, expected) and not torch.equal(before, expected)
    assert all(p.device.type == "meta" for block in visited(pruner.model) for p in block.module.parameters())


def test_a_run_resumes_and_saves_after_its_files_are_removed(llama, tmp_path, monkeypatch):
    expected, _ = both(llama, tmp_path)
    solved, prune_layer = [], "optimum_moonshot.prune.layers.prune_layer"
    from optimum_moonshot.prune.layers import prune_layer as original

    def stop(layer, *arguments):
        if len(solved) == 9:
            raise KeyboardInterrupt
        solved.append(layer.name)
        original(layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prune_layer, stop)
        with pytest.raises(KeyboardInterrupt):
            offloaded(llama).prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    pruner = offloaded(llama)
    report = pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert any("9 layers were reused" in note for note in report.notes)
    for name in ("first", "second"):  # the first save deletes the results
        pruner.save_pretrained(tmp_path / name)
        assert_equal(tmp_path / name, tmp_path / "memory")
    assert not (tmp_path / "run").exists()


def test_results_on_disk_are_stored_without_their_zeros(llama, tmp_path):
    pruner = offloaded(llama)
    pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    stored = sum(tensor.nbytes for tensor in tensors(tmp_path / "run" / "layers").values())
    dense = sum(4 * layer.shape[0] * layer.shape[1] for layer in pruner.report.layers)
    assert stored < 0.6 * dense


def test_a_sweep_restores_the_weights_and_writes_the_chosen_variant(llama, tmp_path):
    ids, results = torch.arange(10)[None], []
    for place in (None, "disk"):
        pruner = MoonshotPruner.from_pretrained(llama, settings(), offload=place)
        before = pruner.model(ids).logits
        swept = pruner.sweep(token_batches(), lambdas=[0.5, 1.0], progress=False)
        assert torch.equal(pruner.model(ids).logits, before)
        pruner.choose(swept.best())
        results.append(([entry.metric for entry in swept.entries], pruner.model(ids).logits))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_any_layers_and_the_head_may_be_offloaded(tmp_path):
    torch.manual_seed(0)
    model = spread(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=False)))
    model.save_pretrained(tmp_path / "dense")
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": place for name, place in places.items()}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"}
    folders = []
    for options in ({}, {"device_map": device_map, "offload_folder": str(tmp_path / "folder")}):
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "dense", **options)
        pruner = MoonshotPruner(loaded, settings(lam=0.5))
        pruner.prune(token_batches(), progress=False)
        pruner.save_pretrained(tmp_path / f"pruned{len(folders)}")
        folders.append(tmp_path / f"pruned{len(folders)}")
    assert_equal(folders[1], folders[0])


def test_half_precision_is_saved_in_shards_with_an_index(tmp_path):
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    pruner = offloaded(tmp_path / "dense")
    pruner.prune(token_batches(), progress=False)
    assert pruner.report.sparsity == 0.5
    pruner.save_pretrained(tmp_path / "small", max_shard_size="4KB")
    assert len(list((tmp_path / "small").glob("model-*.safetensors"))) == 4  # the rest, and three blocks
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path / "small").values())
    loaded = load_pruned(tmp_path / "small")
    assert loaded.dtype == torch.bfloat16
    pruner.save_pretrained(tmp_path / "packed", format="packed", max_shard_size="4KB")
    packed = load_pruned(tmp_path / "packed").state_dict()
    assert all(torch.equal(tensor, packed[name]) for name, tensor in loaded.state_dict().items())
    for options, message in (({"max_shard_size": "many"}, "max_shard_size='many'"), ({"variant": "x"}, "variant='x'")):
        with pytest.raises(MoonshotError, match=message):
            pruner.save_pretrained(tmp_path / "no", **options)


def test_invalid_requests_are_refused_before_any_work(llama, tmp_path):
    with pytest.raises(MoonshotError, match='offload=\'ram\': use "disk" or "cpu"'):
        MoonshotPruner.from_pretrained(llama, settings(), offload="ram")
    with pytest.raises(MoonshotError, match="offload='cpu': the model is on the CPU anyway"):
        MoonshotPruner.from_pretrained(llama, settings(), offload="cpu", device_map="cpu")
    with pytest.raises(MoonshotError, match="device_map=.*name one device"):
        MoonshotPruner.from_pretrained(llama, settings(), offload="disk", device_map={"": "cpu"})
    broken = make("llama")
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(MoonshotError, match="layers.1.mlp.up_proj: its weight holds NaN"):
        offloaded(tmp_path / "broken").prune(token_batches(), progress=False)


def test_offloading_needs_sequential_blocks(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, d_model=16, d_ff=24, d_kv=4, num_layers=3, num_heads=4)
    model = hf.T5ForTokenClassification(hf.T5Config(**sizes, **EDGE, num_labels=96)).eval()
    model.save_pretrained(tmp_path / "t5")
    with pytest.raises(MoonshotError, match="load the model without `offload` to prune it"):
        offloaded(tmp_path / "t5").prune(token_batches(), progress=False)


def test_without_data(llama, tmp_path):
    for name, place in (("memory", None), ("disk", "disk")):
        pruner = MoonshotPruner.from_pretrained(llama, settings(solver="magnitude"), offload=place)
        pruner.prune(progress=False)
        pruner.save_pretrained(tmp_path / name)
    assert_equal(tmp_path / "disk", tmp_path / "memory")


def test_a_failed_read_or_write_keeps_the_model(llama, monkeypatch, tmp_path):
    ids = torch.arange(10)[None]
    pruner = offloaded(llama, offload_dir=str(tmp_path / "cache"))
    before, block = pruner.model(ids).logits, visited(pruner.model)[1]
    read, keys = type(block.weights.slots[0].hook.weights_map).__getitem__, []

    def broken(table, key):
        if len(keys) == 4:
            raise OSError("the disk is gone")
        keys.append(key)
        return read(table, key)

    with monkeypatch.context() as patch:
        patch.setattr(type(block.weights.slots[0].hook.weights_map), "__getitem__", broken)
        with pytest.raises(OSError, match="the disk is gone"), block.onloaded():
            pass
    assert torch.equal(pruner.model(ids).logits, before)
    (tmp_path / "cache").rename(tmp_path / "away")
    (tmp_path / "cache").write_text("no folder")
    with pruner._run(None, None, None, False) as subject:
        prepare(subject, select(subject.model, pruner.config), token_batches())
    with pytest.raises(MoonshotError, match="offload_dir=.*cannot be written"), block.onloaded(), torch.no_grad():
        block.module.mlp.up_proj.weight.zero_()
        mark_written(block.module.mlp.up_proj, "weight")
    assert torch.equal(pruner.model(ids).logits, before)


def test_a_weight_is_stored_if_its_write_was_declared(llama):
    block = visited(offloaded(llama).model)[1]
    projection = block.module.mlp.up_proj
    with block.onloaded(), torch.no_grad():
        projection.weight.fill_(2)
        mark_written(projection, "weight")
    with block.onloaded():
        assert bool((projection.weight == 2).all())
    with pytest.raises(AssertionError, match="weight: without mark_written"), block.onloaded(), torch.no_grad():
        projection.weight.fill_(3)
    with block.onloaded():
        assert bool((projection.weight == 2).all())


def test_a_model_in_memory_can_be_pickled_and_copied_after_a_run(tmp_path):
    model = make("llama")
    MoonshotPruner(model, settings()).prune(token_batches(), progress=False)
    torch.save(model, tmp_path / "model.pt")
    assert not is_offloaded(copy.deepcopy(model))


def test_the_folder_of_fused_experts_is_deleted_with_its_model(tmp_path):
    make("mixtral").save_pretrained(tmp_path / "dense")
    pruner = offloaded(tmp_path / "dense", offload_dir=str(tmp_path / "cache"))
    assert any((tmp_path / "cache").rglob("*.safetensors"))
    del pruner
    gc.collect()
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_removed(share, llama, tmp_path):
    both(llama, tmp_path, solver="wanda", lam=1.0, pattern="unstructured", sparsity=share)


def test_reasons_of_skipped_layers_do_not_depend_on_offloading(tmp_path):
    made("mamba").save_pretrained(tmp_path)
    in_memory, on_disk = (
        MoonshotPruner.from_pretrained(tmp_path, settings(), offload=place) for place in (None, "disk")
    )
    for pruner in (in_memory, on_disk):
        pruner.prune(token_batches(), progress=False)
    assert on_disk.report.skipped == in_memory.report.skipped
    if version.parse(hf.__version__) >= version.parse("5.10"):  # an older Mamba calls all its layers
        assert any("read where its forward is not called" in reason for reason in in_memory.report.skipped.values())


@pytest.mark.filterwarnings("error:Attempting to save a model with offloaded modules")
def test_saving_emits_no_warning_about_loading_the_whole_model(llama, tmp_path):
    pruner = offloaded(llama, solver="magnitude")
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "pruned")
