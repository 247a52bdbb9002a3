"""Runs leave the settings of the program around them out, and restore them; threads cannot mix with a run."""

import copy
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from llama_runs import assert_same, weights
from models import make, token_batches
from offloaded_models import offloaded
from training_runs import trainer

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, prune_weight
from optimum_moonshot.devices import usual_settings
from optimum_moonshot.evaluation.metrics import perplexity
from optimum_moonshot.model.isolation import isolated

ROTATION = {"rotation": "learned", "rotation_steps": 2, "recover": "blockwise", "recover_steps": 4}
STRUCTURED = {"pattern": "structured", "solver": "osscar", "lam": None, "sparsity": 0}


def pruner_of(model, **changes):
    settings = {"pattern": "2:4", "lam": 0.9, "num_samples": 6, "sequence_length": 12, "batch_size": 2, **changes}
    return MoonshotPruner(model, MoonshotConfig(**settings))


def pruned(model, data=None, forward=None, **changes):
    pruner = pruner_of(model, **changes)
    pruner.prune(data or token_batches(), forward=forward, progress=False)
    return pruner


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def prepared(model):
    """As accelerate leaves a model: its forward under autocast, its outputs converted."""
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's Trainer may have set other values
    try:
        return Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def twice_prepared(model):
    prepared(model)
    vars(model).pop("_is_accelerate_prepared", None)
    return prepared(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_blocks(model):
    for block in model.model.layers:
        block.compile(backend="eager")
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def plain(model):
    return model


def slots(model):
    """The functions of each module that a wrapper replaces."""
    return [[vars(module).get(name) for name in ("forward", "_compiled_call_impl")] for module in model.modules()]


@pytest.fixture(scope="module")
def expected():
    """The weights of a plain model after one run that rotates, recovers and solves."""
    return weights(pruned(make("llama"), **ROTATION).model)


@pytest.mark.parametrize("wrap", [prepared, twice_prepared, compiled, compiled_in_place, compiled_blocks])
def test_a_wrapped_model_is_pruned_as_the_plain_one_and_stays_wrapped(wrap, expected):
    model = make("llama")
    wrapped = wrap(model)
    before = slots(model)
    pruner = pruned(wrapped, **ROTATION)
    assert not any("not sequential" in note for note in pruner.report.notes)
    assert_same(model, expected)
    assert pruner.model is model and slots(model) == before


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: default_device("meta"),
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_settings_of_torch_do_not_change_a_run(name, expected):
    model, data = make("llama"), token_batches()
    with SURROUNDINGS[name]():
        states = settings()
        pruned(model, data, **ROTATION)
        assert settings() == states
    assert_same(model, expected)


def settings():
    here = torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")
    return *here, torch.is_grad_enabled(), torch.get_rng_state().tolist()


SOLVERS = [
    {"solver": "alps", "bits": 4},
    {"solver": "cap"},
    {"solver": "obc", "pattern": "unstructured", "sparsity": 0.5, "allocation": "fisher"},
    {"solver": "osscar", "pattern": "structured", "sparsity": 0.25},
    {"recover": "gradual", "recover_steps": 10, "lam": 1.0},
    {"recover": "distill", "recover_steps": 2, "recompute": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SOLVERS, ids=str)
def test_the_default_dtype_changes_no_solver(changes):
    usual, other = make("llama"), make("llama")
    pruned(usual, **changes)
    with default_dtype(torch.bfloat16):
        pruned(other, **changes)
    assert_same(other, weights(usual))


def path(pruner):
    swept = pruner.prune_path(token_batches(), [0.5, 0.8], progress=False)
    swept.apply(0.8)


def sweep(pruner):
    report = pruner.sweep(token_batches(), lambdas=[0.5, 1.0], progress=False)
    pruner.choose(report.entries[0])


def structured(pruner):
    pruner.prune(token_batches(), progress=False)
    pruner.compact()


RUNS = {
    "prune": (lambda pruner: pruner.prune(token_batches(), progress=False), {}),
    "rotate": (lambda pruner: pruner.rotate(token_batches(), progress=False), {"rotation_steps": 2}),
    "sweep": (sweep, {}),
    "prune_path": (path, {"solver": "obc", "pattern": "unstructured", "sparsity": 0.5, "block_size": 8}),
    "reduce_width": (lambda pruner: pruner.reduce_width(12, token_batches()), {}),
    "shrink": (lambda pruner: pruner.shrink(token_batches(), parameters=0.8, progress=False), STRUCTURED),
    "compact": (structured, {**STRUCTURED, "sparsity": 0.25}),
    "plan": (lambda pruner: pruner.plan(token_batches()), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_any_surroundings_equals_a_plain_one(name):
    run, changes = RUNS[name]
    usual, other = pruner_of(make("llama"), **changes), pruner_of(prepared(make("llama")), **changes)
    run(usual)
    with torch.autocast("cpu", torch.bfloat16), default_dtype(torch.bfloat16), torch.no_grad():
        state = settings()
        run(other)
        assert settings() == state
    assert_same(other.model, weights(usual.model))


def test_perplexity_is_that_of_the_plain_model(tokenizer):
    model, text = make("llama"), ["some text " * 20]
    value = perplexity(model, tokenizer, text, sequence_length=12).value
    with torch.autocast("cpu", torch.bfloat16), default_dtype(torch.bfloat16):
        assert perplexity(compiled(prepared(model)), tokenizer, text, sequence_length=12).value == value


@pytest.mark.parametrize("solver", ["sparsegpt", "alps", "obc"])
def test_a_single_matrix_has_the_same_result_under_any_settings(solver):
    weight, inputs, gradients = torch.randn(8, 16), torch.randn(32, 16), torch.randn(4, 8, 16)
    arguments = weight, inputs.T @ inputs, gradients
    config = MoonshotConfig(solver=solver, pattern="2:4", lam=0.5)
    expected = prune_weight(*arguments, config=config).weight
    with torch.autocast("cpu", torch.bfloat16), default_dtype(torch.bfloat16):
        assert torch.equal(prune_weight(*arguments, config=config).weight, expected)


def test_autocast_keeps_no_copy_of_a_weight_from_before_the_run():
    model, batch = make("llama"), token_batches()[0]
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)
        pruned(model)
        assert torch.equal(model(**batch).logits, copy.deepcopy(model)(**batch).logits)


def test_a_model_after_mixed_precision_training(tmp_path):
    model = make("llama")
    trainer(tmp_path, model, bf16=True, max_steps=1).train()
    usual = make("llama")
    usual.load_state_dict(model.state_dict())
    assert vars(model)["forward"] is not None
    assert_same(pruned(model, **ROTATION).model, weights(pruned(usual, **ROTATION).model))


def test_inference_tensors_as_data():
    model = make("vit")
    usual = [{"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])} for _ in range(3)]
    with torch.inference_mode():
        data = [{name: tensor.clone() for name, tensor in batch.items()} for batch in usual]
    models = model, copy.deepcopy(model)
    for each, batches in zip(models, (data, usual), strict=True):
        pruner_of(each).prune(batches, progress=False)
    assert_same(models[0], weights(models[1]))


@pytest.mark.parametrize("changes", [{}, {"lam": 1.0, "recover": "blockwise", "recover_steps": 4}], ids=str)
def test_flex_attention_on_a_cpu_is_noted_and_restored(changes):
    usual, model = make("llama"), make("llama")
    usual.set_attn_implementation("sdpa")
    model.set_attn_implementation("flex_attention")
    report = pruned(model, **changes).report
    assert_same(model, weights(pruned(usual, **changes).model))
    assert any("flex attention has no backward pass on CPUs" in note for note in report.notes)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.slow  # compiles the attention
def test_a_model_with_flex_attention_becomes_compact():
    run, changes = RUNS["compact"]
    usual, pruner = pruner_of(make("llama"), **changes), pruner_of(make("llama"), **changes)
    pruner.model.set_attn_implementation("flex_attention")
    for each in (usual, pruner):
        run(each)
    assert_same(pruner.model, weights(usual.model))


def in_thread(call):
    """The error of a call in another thread, or None."""
    errors = []

    def work():
        try:
            call()
            errors.append(None)
        except MoonshotError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0]


def test_other_threads_cannot_mix_with_a_run(tmp_path):
    usual, model = make("llama"), make("llama")
    errors, earlier = [], copy.deepcopy(model)

    def forward(module, batch):
        if not errors:
            errors.extend(in_thread(lambda each=each: each(batch["input_ids"])) for each in (model, model.model))
            for each in (model, torch.nn.Sequential(model), model.model):
                errors.append(in_thread(lambda each=each: pruned(each)))
            errors.append(in_thread(lambda: pruner.save_pretrained(tmp_path / "saved")))
            with pytest.raises(MoonshotError, match="another run on this model is at work"):
                pruned(model)
            assert in_thread(lambda: earlier(**batch)) is None
        return module(**batch)

    pruner = pruner_of(model)
    pruner.prune(token_batches(), forward=forward, progress=False)
    assert len(errors) == 6
    called, refused = errors[:2], errors[2:]
    assert all("another thread called Llama" in str(error) for error in called)
    assert all("another run on this model is at work" in str(error) for error in refused)
    pruned(usual, forward=lambda module, batch: module(**batch))
    assert_same(model, weights(usual))
    assert in_thread(lambda: model(**token_batches()[0])) is None
    assert slots(model) == slots(usual) and not (tmp_path / "saved").exists()


def test_a_failed_run_lets_other_threads_in_again():
    model = make("llama")
    with pytest.raises(ZeroDivisionError):
        pruned(model, forward=lambda module, batch: 1 / 0)
    assert in_thread(lambda: pruned(model)) is None


def test_threads_of_autograd_belong_to_the_run():
    """On a GPU, they compute checkpointed activations again in a backward pass."""
    model, batch, outputs = make("llama"), token_batches()[0], []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs * 1

        @staticmethod
        def backward(ctx, *gradients):
            outputs.append(model(**batch))
            return gradients[0]

    def forward(module, inputs):
        if not outputs:
            assert in_thread(lambda: Again.apply(torch.ones(1, requires_grad=True)).backward()) is None
        return module(**inputs)

    pruned(model, forward=forward, lam=1.0)
    assert outputs


def test_the_last_thread_restores_what_threads_share():
    model = prepared(make("llama"))
    wrapped, seen = model.forward, []
    with default_dtype(torch.bfloat16):
        first, second = isolated(model), isolated(model)
        first.__enter__()
        in_thread(lambda: second.__enter__())
        first.__exit__(None, None, None)
        seen.append((torch.get_default_dtype(), model.forward))
        in_thread(lambda: second.__exit__(None, None, None))
        seen.append((torch.get_default_dtype(), model.forward))
    assert seen == [(torch.float32, model._original_forward), (torch.bfloat16, wrapped)]


def test_random_numbers_continue_as_if_there_were_no_run():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with usual_settings():
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


def live_tensors():
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


DISTILL = {"recover": "distill", "recover_steps": 2}
REPEATED = {
    "distill": lambda _: pruned(make("llama"), **DISTILL),
    "distill in 16 bits": lambda _: pruned(make("llama").bfloat16(), **DISTILL, bits=8),
    "plan": lambda _: pruner_of(make("llama")).plan(token_batches()),
    "rotate offloaded": lambda folder: offloaded(folder, rotation_steps=2).rotate(token_batches(), progress=False),
    "plan offloaded": lambda folder: offloaded(folder, lam=0.9).plan(token_batches()),
    "shrink": lambda _: RUNS["shrink"][0](pruner_of(make("llama"), **STRUCTURED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_runs_keep_no_tensors(name, tmp_path):
    make("llama").save_pretrained(tmp_path)
    counts = []
    for _ in range(3):
        REPEATED[name](tmp_path)
        counts.append(live_tensors())
    assert counts[1] == counts[2]
