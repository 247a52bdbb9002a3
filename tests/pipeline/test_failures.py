"""A run that fails or is killed leaves the model unchanged, names the cause, and can be resumed."""

import pytest
import torch
from failing_calls import FailingCalls
from llama_runs import assert_same, config, prune, weights
from models import make, token_batches
from torch import nn

from optimum_moonshot import MoonshotError, MoonshotPruner
from optimum_moonshot.prune import run as run_module
from optimum_moonshot.solvers.sparsegpt import SparseGPT


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["capture", "backward", "solve", "commit"])
def test_a_failure_leaves_the_model_unchanged(error, place, monkeypatch):
    model = make("llama").train()
    model.model.layers[1].eval()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before, modes = weights(model), [module.training for module in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    countdown = [5]

    def fail_later(original):
        def wrapped(*args, **kwargs):
            countdown[0] -= 1
            if countdown[0] < 0:
                raise error
            return original(*args, **kwargs)

        return wrapped

    if place == "capture":
        monkeypatch.setattr(nn.Linear, "forward", fail_later(nn.Linear.forward))
    elif place == "backward":
        monkeypatch.setattr(torch.autograd, "backward", fail_later(torch.autograd.backward))
    elif place == "solve":
        monkeypatch.setattr(SparseGPT, "solve", fail_later(SparseGPT.solve))
    else:
        countdown[0] = 8
        original = torch.Tensor.copy_
        armed = []
        real = run_module.Variant.commit

        def commit(self):
            armed.append(True)
            return real(self)

        def copy(self, *args, **kwargs):
            if armed:
                countdown[0] -= 1
                if countdown[0] == 0:
                    raise error
            return original(self, *args, **kwargs)

        monkeypatch.setattr(run_module.Variant, "commit", commit)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(error):
        prune(model)
    monkeypatch.undo()
    assert_same(model, before)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 1
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    assert not hasattr(model.config, "moonshot")


def test_a_run_restores_modes_gradients_and_hooks():
    model = make("llama").train()
    prune(model)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_grad_is_supported_and_inference_mode_is_an_error():
    with torch.no_grad():
        assert prune(make("llama")).report.sparsity == 0.5
    with torch.inference_mode(), pytest.raises(MoonshotError, match="inference_mode"):
        prune(make("llama"))


def test_a_killed_run_resumes_at_its_first_unsolved_layer(tmp_path, monkeypatch):
    whole, resumed = make("llama"), make("llama")
    prune(whole)
    solve = FailingCalls(monkeypatch, (SparseGPT, "solve"), {10}, Boom())
    folder = tmp_path / "partial"
    with pytest.raises(Boom):
        MoonshotPruner(resumed, config()).prune(token_batches(), progress=False, resume_dir=folder)
    assert len(list(folder.glob("layers/*.safetensors"))) == 10
    pruner = MoonshotPruner(resumed, config())
    report = pruner.prune(token_batches(), progress=False, resume_dir=folder)
    assert solve.calls == 11 + 21 - 10
    assert any("10 layers were reused" in note for note in report.notes)
    assert_same(resumed, weights(whole))
    assert len(list(folder.glob("layers/*.safetensors"))) == 21
    pruner.save_pretrained(tmp_path / "saved")
    assert not folder.exists()


def test_results_of_other_settings_are_set_aside(tmp_path, monkeypatch):
    folder = tmp_path / "partial"
    with monkeypatch.context() as patch, pytest.raises(Boom):
        FailingCalls(patch, (SparseGPT, "solve"), None, Boom())
        MoonshotPruner(make("llama"), config()).prune(token_batches(), progress=False, resume_dir=folder)
    model, other = make("llama"), make("llama")
    report = MoonshotPruner(model, config(lam=0.5)).prune(token_batches(), progress=False, resume_dir=folder)
    assert "an unfinished run was set aside until this one is done: the configuration differs in lam" in report.notes
    assert (folder / "earlier").is_dir()
    prune(other, lam=0.5)
    assert_same(model, weights(other))
    (tmp_path / "other.txt").write_text("precious")
    with pytest.raises(MoonshotError, match="resume_dir.*contains other files"):
        MoonshotPruner(make("llama"), config()).prune(token_batches(), resume_dir=tmp_path)


def test_a_full_disk_is_an_error_of_the_resume_folder(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    from optimum_moonshot.pipeline import run_folder as results

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    model = make("llama")
    before = weights(model)
    monkeypatch.setattr(results, "save_file", full)
    with pytest.raises(MoonshotError, match="resume_dir=.*cannot be written.*No space left"):
        MoonshotPruner(model, config()).prune(token_batches(), progress=False, resume_dir=tmp_path / "partial")
    assert_same(model, before)


def test_bad_weights_activations_and_gradients_name_the_layer():
    model = make("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(MoonshotError, match=r"model\.layers\.1\.mlp\.up_proj: its weight holds NaN"):
        prune(model)
    model = make("llama")
    model.model.layers[1].input_layernorm.weight.data[0] = float("inf")
    with pytest.raises(MoonshotError, match=r"layers\.1.*q_proj: its inputs \(activations\) hold NaN"):
        prune(model, lam=1)
    with pytest.raises(MoonshotError, match="calibration loss is nan"):
        prune(model)
    model = make("llama")
    scale = model.model.layers[1].mlp.up_proj
    scale.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * float("nan"),))
    with pytest.raises(MoonshotError, match=r"q_proj: its gradients hold NaN"):
        prune(model)
