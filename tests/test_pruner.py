"""The pruner on tiny models of every kind: pruned and untouched layers, and errors."""

import pytest
import torch
import transformers as hf
from llama_runs import SAMPLES, assert_same, config, prune, weights
from marks import slow
from models import CAUSAL, ENCODERS, image_batches, make, token_batches
from torch import nn

from optimum_moonshot import MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.calibration import observer as statistics_module
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.fisher import SampleGradients
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.prune import layers as solving
from optimum_moonshot.solvers import solver_class, solver_names
from optimum_moonshot.solvers.sparsegpt import SparseGPT


def pruned_names(model):
    return {layer.name for layer in find_structure(model).layers()}


@pytest.mark.parametrize("options", [dict(), slow(dict(solver="wanda", pattern="unstructured", sparsity=0.5))], ids=str)
@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS, "vit"])
def test_every_architecture(name, options, tmp_path, tokenizer):
    model = make(name)
    before, targets = weights(model), pruned_names(model)
    batches = image_batches() if name == "vit" else token_batches(padded=True)
    pruner = prune(model, batches, tokenizer, **options)
    report = pruner.report
    assert {layer.name for layer in report.layers} == targets
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for layer in report.layers:
        weight = parameters.get(layer.name, parameters.get(f"{layer.name}.weight"))
        assert layer.sparsity == (weight == 0).sum().item() / weight.numel() == 0.5
        # SparseGPT is greedy, column by column: on such small matrices it may not improve.
        assert layer.loss <= 1.01 * layer.loss_masked
        assert 0 < layer.reconstruction < 1 and 0 < layer.fisher < 1
    for key, tensor in model.state_dict().items():
        if key.removesuffix(".weight") not in targets:
            assert torch.equal(tensor, before[key]), key
    assert bool(report.skipped) == (name == "mixtral")
    pruner.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    inputs = {key: value for key, value in batches[0].items() if key != "labels"}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.config.moonshot["sparsity"] == report.sparsity == 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "vit"])
@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize("lam", [slow(1.0), 0.5])
def test_every_solver_prunes_whole_models(name, solver, lam):
    """The result equals `prune_weight` on the statistics of each layer."""
    model = make(name)
    dense = weights(model)
    structured = Unstructured not in solver_class(solver).patterns
    choice = dict(solver=solver, pattern="structured" if structured else "unstructured", sparsity=0.5, lam=lam)
    seen = {}
    original = solving.prune_layer

    def spy(layer, statistics, variants):
        seen[layer.name] = (layer.matrix.clone(), statistics, layer, getattr(variants[0].pattern_of(layer), "group", 1))
        return original(layer, statistics, variants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "prune_layer", spy)
        report = prune(model, image_batches() if name == "vit" else token_batches(), **choice).report
    slack = 1.1 if solver == "sparsegpt" else 1.0001  # greedy by columns, it may not improve on tiny matrices
    for layer in report.layers:
        assert layer.sparsity == 0.5 and layer.loss <= slack * layer.loss_masked
        matrix, statistics, pruned, group = seen[layer.name]
        fisher = statistics.gradients
        if not statistics.diagonal and isinstance(fisher, SampleGradients | None):
            gradients = None if fisher is None else fisher.gradients
            alone = prune_weight(matrix, statistics.inputs, gradients, config=config(**choice, group_size=group))
            assert torch.equal(pruned.matrix, alone.weight)
    assert any(not torch.equal(dense[f"{layer.name}.weight"], seen[layer.name][2].parameter) for layer in report.layers)


def test_dense_layers_of_mixtures_are_listed():
    report = prune(make("mixtral")).report
    assert any("MixtralTopKRouter" in reason for reason in report.skipped.values())
    assert "MixtralTopKRouter" in report.table()


@pytest.mark.parametrize("name", ["llama-tied-biased", "gpt2"])
def test_tied_weights_stay_tied_and_dense(name):
    model = make(name)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    prune(model)
    assert model.get_output_embeddings().weight is embedding
    assert torch.equal(embedding, before)


def test_a_targeted_tied_head_is_pruned_with_its_embedding():
    model = make("llama-tied-biased")
    report = prune(model, targets=["lm_head"]).report
    assert [layer.name for layer in report.layers] == ["lm_head"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.lm_head.weight == 0).float().mean() == 0.5


def test_targets_and_ignore():
    model = make("llama")
    report = prune(model, targets=[r"mlp", "lm_head"], ignore=[r"layers\.1\."]).report
    names = [layer.name for layer in report.layers]
    assert "lm_head" in names and all("self_attn" not in name and "layers.1." not in name for name in names)
    assert len(names) == 2 * 3 + 1
    for field in ("targets", "ignore"):
        with pytest.raises(MoonshotError, match=f"{field}: 'nothere' matches no module name"):
            prune(make("llama"), **{field: ["nothere"]})
    with pytest.raises(MoonshotError, match="nothing to prune"):
        prune(make("llama"), ignore=["layers"])


def test_only_the_middle_block_has_a_step_when_only_it_is_pruned():
    everything, one = make("llama"), make("llama")
    full = prune(everything, targets=["layers.1"], recompute=False).report
    assert len(full.layers) == 7
    prune(one, recompute=False)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(everything.state_dict()[name], one.state_dict()[name], atol=1e-6)


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_runs_repeat_bit_for_bit_and_keep_the_global_random_state(lam, tokenizer):
    text = ["some words that are long enough " * 3] * SAMPLES
    first, second = make("llama"), make("llama")
    state = torch.get_rng_state()
    prune(first, text, tokenizer, lam=lam)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    prune(second, text, tokenizer, lam=lam)
    assert_same(first, weights(second))


def test_batch_size_does_not_matter():
    first, second = make("llama"), make("llama")
    prune(first, token_batches(size=1, padded=True))
    prune(second, token_batches(size=3, padded=False))
    third = make("llama")
    prune(third, token_batches(size=1, padded=False))
    for name, tensor in second.state_dict().items():
        assert torch.allclose(tensor, third.state_dict()[name], atol=1e-5), name


def test_lambda_one_runs_no_backward_pass(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a backward pass ran")

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    report = prune(make("llama"), lam=1).report
    assert all(layer.fisher is None and layer.lam == 1 for layer in report.layers)
    with pytest.raises(AssertionError):
        prune(make("llama"), lam=0.9)


def test_attention_only_fisher_is_lambda_one_elsewhere():
    attention, single, both = make("llama"), make("llama"), make("llama")
    report = prune(attention, fisher_layers="attention", recompute=False).report
    prune(single, lam=1, recompute=False)
    prune(both, recompute=False)
    for layer in report.layers:
        inside = "self_attn" in layer.name
        assert layer.lam == (0.9 if inside else 1.0) and (layer.fisher is not None) == inside
        weight = attention.get_submodule(layer.name).weight
        twin = (both if inside else single).get_submodule(layer.name).weight
        assert torch.allclose(weight, twin, atol=1e-5)
    with pytest.raises(MoonshotError, match="fisher_layers='attention'"):
        prune(make("llama"), fisher_layers="attention", targets=["mlp"])


def test_wanda_never_stores_a_gradient_per_sample(monkeypatch):
    shapes = []
    original = statistics_module.Storage.empty

    def spy(self, shape, dtype, what, **options):
        shapes.append((tuple(shape), what))
        return original(self, shape, dtype, what, **options)

    monkeypatch.setattr(statistics_module.Storage, "empty", spy)
    prune(make("llama"), solver="wanda")
    statistics = [shape for shape, what in shapes if "gradients" in what and "output" not in what or "Gram" in what]
    assert statistics and all(shape in {(16,), (24,), (16, 16), (8, 16), (24, 16), (16, 24)} for shape in statistics)
    assert not any("Gram" in what and len(shape) > 1 for shape, what in shapes)


def test_one_blocks_statistics_live_at_a_time(monkeypatch):
    peaks = []
    original = statistics_module.Storage.empty

    def spy(self, *args, **options):
        tensor = original(self, *args, **options)
        peaks.append(sum(self.used.values()))
        return tensor

    monkeypatch.setattr(statistics_module.Storage, "empty", spy)
    prune(make("llama"))
    shallow = max(peaks)
    peaks.clear()
    deep = hf.LlamaConfig(**{**make("llama").config.to_dict(), "num_hidden_layers": 12})
    prune(hf.LlamaForCausalLM(deep))
    caches = 9 * SAMPLES * 12 * 16 * 4  # inputs of nine more blocks
    assert max(peaks) <= shallow + caches


def test_small_memory_gives_the_same_weights_in_more_passes(tmp_path):
    plenty, tight, spilled = make("llama"), make("llama"), make("llama")
    prune(plenty, lam=0.5)
    largest = SAMPLES * 24 * 16 * 4
    prune(tight, lam=0.5, max_memory=6 * largest)
    report = prune(spilled, lam=0.5, max_memory=4096, offload_dir=str(tmp_path)).report
    assert any("went to" in note for note in report.notes)
    assert not list(tmp_path.iterdir())
    for other in (tight, spilled):
        for name, tensor in plenty.state_dict().items():
            assert torch.allclose(tensor, other.state_dict()[name], atol=1e-5), name
    with pytest.raises(MoonshotError, match="max_memory.*offload_dir"):
        prune(make("llama"), max_memory=4096)


@pytest.mark.parametrize("fisher", ["rows", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_float32_statistics(dtype, fisher, monkeypatch):
    seen = set()
    original = SparseGPT.solve

    def spy(self, objective, pattern):
        fisher = objective.fisher
        stored = fisher.gradients if fisher.shared is None else fisher.shared
        seen.update({objective.weight.dtype, objective.gram.dtype, stored.dtype})
        return original(self, objective, pattern)

    monkeypatch.setattr(SparseGPT, "solve", spy)
    model = make("llama").to(dtype)
    report = prune(model, fisher=fisher).report
    assert seen == {torch.float32} and report.sparsity == 0.5
    exact = make("llama").to(dtype).float()
    prune(exact, fisher=fisher)
    for layer in report.layers:
        weight, reference = model.get_submodule(layer.name).weight, exact.get_submodule(layer.name).weight
        assert ((weight == 0) == (reference == 0)).float().mean() > 0.9


def test_magnitude_needs_no_data():
    model = make("llama")
    before = weights(model)
    report = MoonshotPruner(model, config(solver="magnitude", lam=None)).prune(progress=False)
    assert report.calibration is None and report.sparsity == 0.5
    for layer in report.layers:
        name = layer.name + ".weight"
        kept = model.state_dict()[name] != 0
        assert layer.loss is None
        assert torch.equal(model.state_dict()[name], before[name] * kept)
        assert before[name][kept].abs().mean() > before[name][~kept].abs().mean()
    with_data = prune(make("llama"), solver="magnitude", lam=None).report
    assert all(layer.lam == 1 and 0 < layer.reconstruction < 1 for layer in with_data.layers)
    with pytest.raises(MoonshotError, match="calibration=None: solver='wanda' needs data"):
        MoonshotPruner(make("llama"), config(solver="wanda")).prune()


def test_layers_that_do_not_divide_into_groups_stay_dense_and_are_listed():
    model = make("llama")
    report = prune(model, pattern="4:16").report
    assert all("down_proj" not in layer.name for layer in report.layers)
    assert len(report.skipped) == 3 and "24 inputs do not divide" in next(iter(report.skipped.values()))
    with pytest.raises(MoonshotError, match="fits no layer"):
        prune(make("llama"), pattern="5:7")


def test_models_without_a_loss_are_refused():
    answering = hf.BertForQuestionAnswering(make("bert").config).eval()
    with pytest.raises(MoonshotError, match="returns no logits.*lam=1"):
        prune(answering)
    assert prune(answering, lam=1).report.sparsity == 0.5
    images = [{"pixel_values": batch["pixel_values"]} for batch in image_batches()]
    with pytest.raises(MoonshotError, match="labels"):
        prune(make("vit"), images)
    assert prune(make("vit"), images, lam=1).report.sparsity == 0.5
    with pytest.raises(MoonshotError, match="mask token"):
        prune(make("bert"))


def test_a_custom_loss():
    def loss(output, batch):
        return output.logits.float().square().mean((1, 2))

    custom, default = make("llama"), make("llama")
    pruner = MoonshotPruner(custom, config(lam=0.1))
    pruner.prune(token_batches(), loss=loss, progress=False)
    prune(default, lam=0.1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(custom.state_dict()[name], default.state_dict()[name])


def test_the_default_lambda_is_the_papers():
    assert prune(make("llama"), lam=None).report.layers[0].lam == 0.9
    assert prune(make("vit"), image_batches(), lam=None).report.layers[0].lam == 0.5


def test_wrong_types_are_refused():
    with pytest.raises(MoonshotError, match="config is a dict"):
        MoonshotPruner(make("llama"), {"solver": "wanda"})
    with pytest.raises(MoonshotError, match="model is a str"):
        MoonshotPruner("gpt2", config())
    with pytest.raises(MoonshotError, match="not pruned yet"):
        MoonshotPruner(make("llama"), config()).save_pretrained("nowhere")
    with pytest.raises(MoonshotError, match="nothing to prune"):
        MoonshotPruner(nn.Sequential(nn.ReLU()), config()).prune(token_batches())


def test_weights_that_are_shared_without_a_declaration_are_not_saved(tmp_path):
    model = make("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    pruner = prune(model)
    for format in ("dense", "packed"):
        with pytest.raises(MoonshotError, match="shares weights that its class does not declare.*up_proj.*clone"):
            pruner.save_pretrained(tmp_path / "out", format=format)
    assert not any((tmp_path / "out").glob("*.safetensors"))


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    model = make("llama")
    pruner = prune(model)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model-00001-of-00002.safetensors").write_text("stale")
    original = model.save_pretrained

    def disk_full(path, **kwargs):
        original(path, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", disk_full)
    with pytest.raises(MoonshotError, match="No space left"):
        pruner.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model-00001-of-00002.safetensors", "notes.txt"]
    monkeypatch.undo()
    pruner.save_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "notes.txt", "moonshot_report.json"}
    assert not any("stale" in name or "00001" in name for name in names)
    report = PruneReport.load(folder)
    assert report.to_dict() == pruner.report.to_dict()
    with pytest.raises(MoonshotError, match="is a file"):
        pruner.save_pretrained(folder / "notes.txt")


def test_from_pretrained_loads_the_class_that_was_saved(tmp_path, tokenizer):
    for name in ("llama", "bert", "vit"):
        model = make(name)
        model.save_pretrained(tmp_path / name)
        if name != "vit":
            tokenizer.save_pretrained(tmp_path / name)
        pruner = MoonshotPruner.from_pretrained(tmp_path / name, config(), dtype=torch.bfloat16)
        assert type(pruner.model) is type(model) and pruner.model.dtype == torch.bfloat16
        assert (pruner.tokenizer is None) == (name == "vit")
    with pytest.raises(OSError):
        MoonshotPruner.from_pretrained(tmp_path / "missing", config())


@pytest.mark.parametrize("ids", [[[1, 2, 200]], [[1, -1, 3]], [[1.0, 2.0, 3.0]]])
def test_tokens_without_an_embedding_are_named(ids):
    with pytest.raises(MoonshotError, match=r"^input_ids: (token (200|-1) is outside|token ids are torch.float32)"):
        prune(make("llama"), [{"input_ids": torch.tensor(ids)}], num_samples=1)


def test_a_tokenizer_of_another_model_is_named(tokenizer):
    model = make("llama")
    with torch.no_grad():
        model.resize_token_embeddings(40)
    with pytest.raises(MoonshotError, match="^tokenizer: token .* has 40 tokens; use the tokenizer of the model"):
        prune(model, ["what is written here " * 9] * 6, tokenizer)
