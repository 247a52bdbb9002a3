"""Runs that remove experts: report, card, files, later pruning, failures, resuming, and the command line."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from expert_removal import model_of, settled
from models import token_batches
from removed_experts import config, logits, prune, removed, settled_mixtral
from tiny_mixtures import mixtral, same

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, load_pruned
from optimum_moonshot.__main__ import main
from optimum_moonshot.calibration.mixture_sums import MixtureSums
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.model.layer_kinds import expert_parameters
from optimum_moonshot.solvers.base import solver_class

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def test_incompatible_operations_are_refused():
    pruner = MoonshotPruner(mixtral(8), config())
    with pytest.raises(MoonshotError, match="calibration=None: solver='osscar' needs data"):
        pruner.prune(progress=False)
    with pytest.raises(MoonshotError, match="pattern='experts': variants share one model"):
        pruner.sweep(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="rotation='learned': pattern='experts' removes experts as they are"):
        pruner.rotate(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="pattern='experts': the optimizer has the weights of all experts"):
        MoonshotCallback(config(), begin_step=1)
    with pytest.raises(MoonshotError, match="nothing to compact|not pruned yet"):
        pruner.compact()


def test_experts_are_not_removed_without_data(monkeypatch):
    monkeypatch.setattr(solver_class("frequency"), "calibrated", False)
    with pytest.raises(MoonshotError, match="calibration=None: pattern='experts' needs data"):
        MoonshotPruner(mixtral(8), config(solver="frequency")).prune(progress=False)


def test_report_and_card_list_the_removed_experts(tmp_path):
    model = settled_mixtral()
    before = model.num_parameters()
    pruner = prune(model, lam=0.5)
    done = pruner.compact()
    assert pruner.model is model and done.config == {"num_local_experts": (8, 6)}
    assert done.removed == dict.fromkeys(removed(pruner), 2) and done.parameters == (before, model.num_parameters())
    fraction = 1 - model.num_parameters() / before
    assert pruner.report.sparsity == 0.25 and fraction < 0.25
    assert pruner.report.model_sparsity == pytest.approx(fraction, abs=0.01)  # router rows are removed too
    pruner.save_pretrained(tmp_path)
    assert PruneReport.load(tmp_path).to_dict()["layers"] == pruner.report.to_dict()["layers"]
    card, table = (tmp_path / "README.md").read_text(), pruner.report.table(width=400)
    for layer in pruner.report.layers:
        numbers = ", ".join(map(str, layer.experts.removed))
        assert f"| `{layer.name}` | {numbers} |" in card and f"without experts {numbers}; L_λ osscar" in table
    assert "25.0% of the experts of its 2 mixtures were removed" in card and "num_local_experts 8 → 6" in card
    record = json.loads((tmp_path / "config.json").read_text())["moonshot"]
    assert record["compaction"] == done.to_dict() and record["config"]["pattern"] == "experts"
    assert same(load_pruned(tmp_path), model)
    with pytest.raises(MoonshotError, match="makes no layer smaller"):
        pruner.save_pretrained(tmp_path / "packed", format="packed")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"removed": [1, "2"]}, r"layers\[0\].experts.removed\[1\]='2': must be a whole number"),
        ({"losses": {"osscar": "small"}}, r"experts.losses\['osscar'\]='small': must be a number"),
        ({"losses": {}}, "experts.losses={}: must not be empty"),
        ({"more": 1}, "experts.more is an unknown field"),
    ],
    ids=str,
)
def test_a_damaged_report_of_experts_is_refused(damage, message):
    values = json.loads(json.dumps(prune(settled_mixtral(), lam=1.0).report.to_dict()))
    assert PruneReport.from_dict(copy.deepcopy(values)).layers[0].experts is not None
    values["layers"][0]["experts"] |= damage
    with pytest.raises(MoonshotError, match=message):
        PruneReport.from_dict(values)


@pytest.mark.parametrize("family_name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_remaining_experts_can_be_pruned_after_reloading(family_name, format, tmp_path):
    """Experts are removed, saved and loaded; then the remaining weights get an ordinary pattern."""
    first, second = tmp_path / "first", tmp_path / "second"
    model = settled(model_of(family_name))
    prune(model).save_pretrained(first)
    pruner = MoonshotPruner.from_pretrained(first, MoonshotConfig(pattern="2:4", lam=1.0, num_samples=6))
    assert pruner.model.config.num_local_experts == 3
    report = pruner.prune(token_batches(), progress=False)
    assert report.sparsity == 0.5 and any("experts" in layer.name for layer in report.layers)
    pruner.save_pretrained(second, format=format)
    loaded = load_pruned(second)
    assert same(loaded, pruner.model) and verify(second)
    assert all(len(module.down_proj) == 3 for module in loaded.modules() if expert_parameters(module))
    batch = token_batches(seed=7)[0]
    torch.testing.assert_close(logits(loaded, batch), logits(pruner.model, batch))


def test_remaining_experts_can_be_pruned_in_memory():
    model = settled_mixtral()
    prune(model)
    report = MoonshotPruner(model, MoonshotConfig(pattern="2:4", num_samples=6)).prune(token_batches(), progress=False)
    assert report.sparsity == 0.5 and report.compaction is None
    for module in (block.mlp.experts for block in model.model.layers):
        assert module.down_proj.shape == (6, 16, 24) and float((module.down_proj == 0).float().mean()) == 0.5


def test_a_failed_run_keeps_gradients(monkeypatch):
    model = settled_mixtral()
    batch = token_batches()[0]
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MixtureSums, "result", interrupted)
        prune(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])
    prune(model)
    assert model.model.layers[0].mlp.gate.weight.grad is None and model.lm_head.weight.grad is not None


def interrupted(self):
    raise KeyboardInterrupt


def test_the_smaller_model_generates_and_trains():
    model = settled_mixtral()
    weight = model.lm_head.weight
    prune(model)
    assert model.lm_head.weight is weight and all(parameter.requires_grad for parameter in model.parameters())
    batch = token_batches()[0]
    generated = model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated.shape == (2, 15)
    model(**batch, labels=batch["input_ids"], output_router_logits=True).loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.shape == (6, 16)


def test_experts_are_removed_while_loading(tmp_path):
    dense = settled_mixtral()
    dense.save_pretrained(tmp_path / "dense")
    settings = config(calibration=token_batches(), lam=0.5)
    loaded = hf.MixtralForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=settings)
    prune(dense, lam=0.5)
    assert same(loaded, dense) and loaded.config.num_local_experts == 6
    MoonshotPruner(loaded, settings).save_pretrained(tmp_path / "small")
    assert same(hf.MixtralForCausalLM.from_pretrained(tmp_path / "small"), dense)


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    model, plain = settled_mixtral(), settled_mixtral()
    expected = removed(prune(plain))
    original, mixtures = MixtureSums.result, []

    def killed(self):
        mixtures.append(self.mixture.name)
        if len(mixtures) == 2:
            raise KeyboardInterrupt
        return original(self)

    before = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(MixtureSums, "result", killed)
        with pytest.raises(KeyboardInterrupt):
            MoonshotPruner(model, config()).prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert same(model, before) and len(mixtures) == 2
    pruner = MoonshotPruner(model, config())
    with monkeypatch.context() as patch:
        patch.setattr(MixtureSums, "result", lambda self: mixtures.append(self.mixture.name) or original(self))
        pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert len(mixtures) == 3 and mixtures[0] != mixtures[2] and removed(pruner) == expected and same(model, plain)
    assert "1 layers were reused from an interrupted run" in pruner.report.notes
    pruner.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_a_failure_while_slicing_restores_the_model(monkeypatch):
    model = settled_mixtral()
    before, axes = copy.deepcopy(model), []
    original = torch.Tensor.index_select

    def failing(self, axis, index):
        axes.append(axis)
        if len(axes) == 5 + len(list(before.model.layers)) * 3:  # after the search for further tensors to slice
            raise KeyboardInterrupt
        return original(self, axis, index)

    monkeypatch.setattr(torch.Tensor, "index_select", failing)
    with pytest.raises(KeyboardInterrupt):
        prune(model)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()
    assert model.model.layers[0].mlp.experts.num_experts == 8


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    mixtral_config = hf.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8, max_position_embeddings=64)
    hf.MixtralForCausalLM(mixtral_config).save_pretrained(tmp_path / "dense")
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "dense")
    text = str(DEMO / "calibration.txt")
    main(
        [
            *("prune", str(tmp_path / "dense"), "--output", str(tmp_path / "out"), "--calibration", text),
            *("--pattern", "experts", "--solver", "osscar", "--sparsity", "0.25", "--num-samples", "4"),
            *("--sequence-length", "32", "--eval", text),
        ]
    )
    output = capsys.readouterr().out
    assert re.search(r"parameters  [\d,]+ → [\d,]+", output) and "num_local_experts 8 → 6" in output
    assert "perplexity" in output and "L_λ osscar" in output.replace("\n", " ")
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_local_experts == 6
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path / "dense"), "--output", str(tmp_path / "no"), "--pattern", "experts"])
    assert "error: --sparsity" in capsys.readouterr().err
