"""Rotations in runs, sweeps and commands: the resulting model, also after failures and kills."""

import json
from pathlib import Path

import pytest
import torch
from models import image_batches, make, token_batches
from rotation_runs import SETTINGS, prune, pruner, same, weights
from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.__main__ import main
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.reports.record import PruningRecord
from optimum_moonshot.rotate import run as rotating
from optimum_moonshot.rotate.basis import check_same, outputs
from optimum_moonshot.rotate.report import ROTATION_NAME, RotationReport


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "phi"])
@pytest.mark.parametrize("lam", [1, 0.5])
def test_a_run_rotates_first(name, lam):
    done = prune(name, lam=lam)
    report = done.report
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert report.rotation.objective_after < report.rotation.objective_before
    assert report.rotation.spaces["residual stream"] == (1, 16) and not report.rotation.refused
    assert report.rotation.line() in report.table() and report.seconds["rotation"] > 0
    assert PruneReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    record = PruningRecord.of(done.model)
    assert record.rotation["rotations"] == "1 of 16, " + ("6 of 4" if name in ("llama", "mixtral") else "12 of 4")
    assert record.config["rotation"] == "learned"


def test_at_sparsity_0_nothing_changes():
    dense = weights(pruner().model)
    done = prune(sparsity=0.0)
    assert same(weights(done.model), dense)
    assert not done.report.rotation.rotated and "nothing was rotated" in done.report.table()


def test_a_rotated_model_is_the_same_function_and_prunes_like_a_run():
    alone = pruner("llama-tied-biased")
    batch, dense = probe_inputs(alone.model), outputs(alone.model, probe_inputs(alone.model))
    report = alone.rotate(token_batches(), progress=False)
    check_same(alone.model, batch, dense, "it")
    assert report.untied_bytes == 96 * 16 * 4 and "untied" in report.line()
    assert not alone.model.config.tie_word_embeddings
    alone.prune(token_batches(), progress=False)
    at_once = prune("llama-tied-biased")
    together = weights(at_once.model)
    for name, weight in weights(alone.model).items():  # some kernels round by the alignment of their operands
        assert torch.equal(weight == 0, together[name] == 0)
        torch.testing.assert_close(weight, together[name], rtol=1e-4, atol=1e-5)
    assert alone.report.rotation == report and PruningRecord.of(alone.model).rotation == report.summary()
    with pytest.raises(MoonshotError, match="rotated already"):
        alone.rotate(token_batches(), progress=False)


def test_equal_seeds_give_equal_bits_and_sampled_rows_others():
    first, again, fewer = (weights(prune(**changes).model) for changes in ({}, {}, {"rotation_rows": 4}))
    assert same(first, again) and not same(first, fewer)


def test_equal_weights_need_no_gradients(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a backward pass")

    prune(lam=1)
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **more: args[0].numel() == 1 or forbidden())
    with pytest.raises(AssertionError, match="a backward pass"):
        prune(lam=1)


def test_heads_alone():
    done = prune("llama-tied-biased", rotation="heads")
    assert set(done.report.rotation.spaces) == {f"model.layers.{i}.self_attn.o_proj heads" for i in range(3)}
    assert done.model.config.tie_word_embeddings and not done.report.rotation.untied_bytes


def test_unrotated_spaces_are_reported():
    report = prune("gemma3").report
    assert report.rotation.rotations == "6 of 8"
    assert "scales its coordinates" in report.rotation.refused["residual stream"]
    assert "not the residual stream: model.layers.0.post_attention_layernorm scales" in report.table()


def test_images_and_n_m():
    data = image_batches()
    done = prune("vit", data, sparsity=None, pattern="2:4", ignore=["classifier"])
    assert done.report.rotation.spaces["residual stream"] == (1, 16)
    outputs = ("attention.o_proj", "attention.output.dense")  # names differ between releases of transformers
    layer = next(module for name, module in done.model.named_modules() if name.endswith(outputs))
    assert bool(((layer.weight.view(-1, 4) == 0).sum(1) >= 2).all())


@pytest.mark.parametrize("moment", ["rotatable_spaces", "check_invariance", "gather", "learn", "check_same", "solve"])
def test_a_failure_does_not_change_the_model(moment, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    done = pruner("llama-tied-biased")
    dense = weights(done.model)
    if moment == "solve":
        monkeypatch.setattr("optimum_moonshot.prune.run.prune_layers", fail)
    else:
        monkeypatch.setattr(rotating, moment, fail)
    with pytest.raises(KeyboardInterrupt):
        done.prune(token_batches(), progress=False)
    assert same(weights(done.model), dense)
    assert done.model.lm_head.weight is done.model.model.embed_tokens.weight
    assert done.model.config.tie_word_embeddings and not hasattr(done.model.config, "moonshot")


def test_too_little_device_memory_is_reported(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rotating, "learn", fail)
    done = pruner()
    dense = weights(done.model)
    with pytest.raises(MoonshotError, match="out of device memory: lower max_memory, .*set rotation_rows"):
        done.prune(token_batches(), progress=False)
    assert same(weights(done.model), dense)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 3, 5])  # the last is that of the four steps' result
def test_a_killed_run_resumes_bit_for_bit(saves, tmp_path, monkeypatch):
    whole = weights(prune().model)
    put = ResultStore.put_rotation
    monkeypatch.setattr(rotating, "SAVED_EVERY", 1)

    def kill(store, tensors, values):
        put(store, tensors, values)
        if values["steps"] + values["done"] == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "put_rotation", kill)
        with pytest.raises(KeyboardInterrupt):
            pruner().prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    again = pruner()
    again.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert same(weights(again.model), whole)
    assert any(f"{saves - 1} steps of the rotation were reused" in note for note in again.report.notes)
    again.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_a_run_killed_while_solving_reuses_the_rotation(tmp_path, monkeypatch):
    whole = weights(prune().model)
    put, count = ResultStore.put, []

    def kill(store, *args):
        put(store, *args)
        count.append(1)
        if len(count) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "put", kill)
        with pytest.raises(KeyboardInterrupt):
            pruner().prune(token_batches(), progress=False, resume_dir=tmp_path)
    monkeypatch.setattr(rotating, "gather", lambda *_: pytest.fail("learned again"))
    again = pruner()
    again.prune(token_batches(), progress=False, resume_dir=tmp_path)
    assert same(weights(again.model), whole)


def test_a_sweep_rotates_once_and_stays_dense_until_a_choice():
    done = pruner()
    dense = weights(done.model)
    swept = done.sweep(token_batches(), lambdas=[1.0, 0.5], progress=False)
    assert same(weights(done.model), dense)
    entry = next(entry for entry in swept.entries if entry.lam == 0.5)
    with done.applied(entry):
        inside = weights(done.model)
    assert same(weights(done.model), dense) and not same(inside, dense)
    done.choose(entry)
    assert same(weights(done.model), inside)
    assert same(inside, weights(prune(lam=0.5, recompute=False).model))
    assert done.report.rotation.rotated


def test_a_path_of_sparsities_rotates_once():
    done = pruner("llama", solver="obc", lam=1, targets=["o_proj"])
    dense = weights(done.model)
    path = done.prune_path(token_batches(), [0.25, 0.5], progress=False)
    assert same(weights(done.model), dense)
    batch = probe_inputs(done.model)
    before = outputs(done.model, batch)
    with path.applied(0.25):
        assert not torch.equal(outputs(done.model, batch)[0], before[0])
    assert same(weights(done.model), dense)
    path.apply(0.25)
    path.apply(0.5)
    assert done.report.sparsity == 0.5 and done.report.rotation.rotated


@pytest.mark.parametrize("changes", [{"pattern": "2:4"}, {"pattern": "2:4", "bits": 4, "quant_group": 64}])
def test_a_pruned_model_is_not_rotated(changes):
    pruned = pruner(rotation=None, **changes)
    pruned.prune(token_batches(), progress=False)
    before = weights(pruned.model)
    for again in (pruned, MoonshotPruner(pruned.model, MoonshotConfig(sparsity=0.5))):
        with pytest.raises(MoonshotError, match=r"rotation: .*pruned already \(2:4\).*rotate the dense model"):
            again.rotate(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="pruned already"):
        MoonshotPruner(pruned.model, MoonshotConfig(**SETTINGS)).prune(token_batches(), progress=False)
    assert same(weights(pruned.model), before)


def test_a_compact_model_is_rotated():
    small = pruner(rotation=None, solver="osscar", pattern="structured", sparsity=0.25, lam=1)
    small.prune(token_batches(), progress=False)
    small.compact()
    again = MoonshotPruner(small.model, MoonshotConfig(**SETTINGS))
    report = again.prune(token_batches(), progress=False)
    assert report.rotation.rotated


def test_data_are_needed():
    with pytest.raises(MoonshotError, match="rotation='learned': it is learned on calibration data"):
        MoonshotPruner(make("llama"), MoonshotConfig(**SETTINGS, solver="magnitude")).prune(progress=False)


def test_missing_gradients_are_explained():
    data = [{"pixel_values": batch["pixel_values"]} for batch in image_batches()]
    with pytest.raises(MoonshotError, match="rotation_weights='fisher': .*rotation_weights='equal' needs no gradients"):
        prune("vit", data, lam=1)
    assert prune("vit", data, lam=1, rotation_weights="equal").report.rotation.weighted == "equal"


def test_structured_patterns_are_refused():
    with pytest.raises(MoonshotError, match="rotation='learned': pattern='structured'"):
        MoonshotConfig(solver="osscar", pattern="structured", sparsity=0.5, rotation="learned")


def test_training_keeps_its_basis():
    with pytest.raises(MoonshotError, match="rotation='learned': the optimizer's state .* rotate it before"):
        MoonshotCallback(MoonshotConfig(**SETTINGS))


@pytest.mark.slow
def test_the_command_rotates_and_saves(tmp_path, capsys):
    demo = Path(__file__).parents[2] / "examples" / "demo_model"
    argv = ["rotate", demo, "--output", tmp_path / "out", "--pattern", "2:4", "--dtype", "float32"]
    argv += ["--calibration", demo / "calibration.txt", "--num-samples", "4", "--sequence-length", "64"]
    main([str(part) for part in [*argv, "--rotation-steps", "2", "--rotation-rows", "128"]])
    assert "rotations: 1 of 256, 8 of 64" in capsys.readouterr().out
    report = RotationReport.load(tmp_path / "out")
    assert report.steps == 2 and report.rotated and report.objective_after < report.objective_before
    dense = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    batch = probe_inputs(dense)
    check_same(loaded, batch, outputs(dense, batch), "the command")
    assert not torch.equal(loaded.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "in another basis" in card and ROTATION_NAME in card and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pattern", "2:4", "--rotation", "rows"], "--rotation rows: use"),
        (["--pattern", "2:4", "--rotation-steps", "0"], "--rotation-steps 0: give a whole number"),
        ([], "--sparsity: "),
    ],
)
def test_the_command_reports_errors(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["rotate", "some/model", "--output", str(tmp_path / "out"), *options])
    assert caught.value.code == 2 and f"error: {message}" in capsys.readouterr().err
