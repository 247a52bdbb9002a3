"""`MoonshotCallback` under the Trainer: zeros, schedules, the log, and runs that resume."""

import json
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf
from marks import slow
from masked_models import pruned, zeros
from models import make, token_batches
from tiny_mixtures import same
from training_runs import CONFIG, HALF, samples, trainer

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.integrations.trainer import seeded_random_state, training_inputs
from optimum_moonshot.masks import find_pruned


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adafactor", "gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
        {"bf16": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_a_pruned_model_keeps_its_zeros(changes, tmp_path, capsys):
    model = pruned()
    before = zeros(model)
    run = trainer(tmp_path, model, MoonshotCallback(), **changes)
    run.train()
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(model))
    assert all(entry["moonshot_sparsity"] == 0.5 for entry in run.state.log_history)
    assert "sparsity 0.5000 over 21 layers: every removed weight is zero; every layer is 2:4" in capsys.readouterr().out
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    dense = pruned()
    trainer(tmp_path, dense, **changes).train()
    assert (dense.model.layers[0].mlp.up_proj.weight == 0).sum() == 0


def test_bfloat16_weights(tmp_path):
    model = pruned().bfloat16()
    before = zeros(model)
    trainer(tmp_path, model, MoonshotCallback()).train()
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(model))


@pytest.mark.slow
def test_torch_compile(tmp_path):
    model = pruned()
    before = zeros(model)
    changes = dict(torch_compile=True, torch_compile_backend="aot_eager", max_steps=2)
    trainer(tmp_path, model, MoonshotCallback(teacher=make("llama")), **changes).train()
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(model))


def test_pruning_at_a_step(tmp_path):
    class Watch(hf.TrainerCallback):
        seen = {}

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.seen[state.global_step] = (model.model.layers[1].mlp.up_proj.weight == 0).float().mean().item()

    model = make("llama")
    callback = MoonshotCallback(CONFIG, begin_step=3)
    run = trainer(tmp_path, model, callback, Watch())
    run.train()
    assert Watch.seen == {step: 0.5 if step >= 3 else 0.0 for step in range(6)}
    logged = {entry["step"]: entry for entry in run.state.log_history if "loss" in entry}
    assert "moonshot_sparsity" not in logged[3] and logged[4]["moonshot_sparsity"] == 0.5
    losses = [layer.loss for layer in callback.report.layers]
    assert min(losses) < logged[6]["moonshot_loss"] < max(losses)
    assert any(entry["step"] == 3 and "moonshot_loss" in entry for entry in run.state.log_history)
    assert model.config.moonshot["sparsity"] == 0.5


@pytest.mark.parametrize("recover", [None, "blockwise"])
def test_pruning_under_mixed_precision_is_block_by_block(recover, tmp_path):
    callback = MoonshotCallback(replace(CONFIG, recover=recover, recover_steps=5), begin_step=2)
    run = trainer(tmp_path, make("llama"), callback, bf16=True)
    run.train()
    assert not any("not sequential" in note for note in callback.report.notes)
    assert len(callback.report.recovery) == (3 if recover else 0)
    assert "_original_forward" in vars(run.model) and run.model.forward != run.model._original_forward


def test_the_cubic_schedule():
    callback = MoonshotCallback(HALF, begin_step=2, end_step=10, every=3)
    steps = [2, 5, 8, 10]
    assert list(callback.schedule) == steps
    for j, step in enumerate(steps, start=1):
        assert callback.schedule[step] == pytest.approx(0.6 * (1 - (1 - j / 4) ** 3))
    assert MoonshotCallback(HALF, begin_step=2, end_step=4, every=9).schedule.keys() == {2, 4}
    assert MoonshotCallback(HALF, begin_step=2, end_step=2, every=1).schedule == {2: 0.6}


def test_layers_of_different_patterns(tmp_path, capsys):
    config = replace(CONFIG, allocation={"attn": "4:8", "down_proj": "2:3"})
    callback = MoonshotCallback(config, begin_step=1)
    model = make("llama")
    trainer(tmp_path, model, callback).train()
    counts = "; 3 of them are 2:3; 6 of them are 2:4; 12 of them are 4:8"
    assert counts in capsys.readouterr().out
    trainer(tmp_path, model, MoonshotCallback()).train()  # patterns from the model's configuration
    assert counts in capsys.readouterr().out
    trainer(tmp_path, model, MoonshotCallback(targets=("lm_head", "proj"))).train()
    assert f"over 22 layers: every removed weight is zero{counts}" in capsys.readouterr().out


def test_the_callback_uses_the_calibration_data_of_the_configuration(tmp_path):
    data = token_batches(6)
    callback = MoonshotCallback(replace(CONFIG, calibration=data), begin_step=1)
    model, expected = make("llama"), make("llama")
    run = trainer(tmp_path, model, callback, data=samples(4), learning_rate=0.0)
    run.train()
    MoonshotPruner(expected, CONFIG).prune(data, progress=False)
    assert same(model, expected)


def test_pruning_over_a_schedule(tmp_path):
    run = trainer(tmp_path, make("llama"), MoonshotCallback(HALF, end_step=4, every=2))
    run.train()
    logged = [entry["moonshot_sparsity"] for entry in run.state.log_history if "loss" in entry]
    expected = [0.6 * (1 - (1 - (step // 2 + 1) / 3) ** 3) for step in range(6)]
    assert logged == pytest.approx(expected, abs=3e-3)
    assert logged[-1] == pytest.approx(0.6, abs=2e-3)


def test_pruning_keeps_the_random_state(tmp_path):
    """Pruning to sparsity 0 changes nothing else: dropout, shuffling and the random numbers after it are the same."""

    def run(*callbacks):
        torch.manual_seed(3)
        model = make("gpt2").train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        trainer(tmp_path, model, *callbacks, full_determinism=False).train()
        return model, (torch.rand(1).item(), random.random(), np.random.rand())

    plain, numbers = run()
    touched, others = run(MoonshotCallback(MoonshotConfig(sparsity=0.0, num_samples=6, lam=0.9), begin_step=2))
    assert numbers == others
    assert same(plain, touched)


def test_seeded_random_state_isolates_every_generator():
    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError), seeded_random_state(7):
        first = draw()
        raise KeyError
    assert draw() == expected
    with seeded_random_state(7):
        assert draw() == first


@pytest.mark.parametrize("first_save", [slow(2), 3, slow(4)])
@pytest.mark.parametrize("kind", ["keep", "step", "schedule", "structured", "teacher"])
def test_a_resumed_run_equals_the_uninterrupted_one(kind, first_save, tmp_path):
    def make_callback():
        if kind == "step":
            return MoonshotCallback(CONFIG, begin_step=3)
        if kind == "schedule":
            return MoonshotCallback(HALF, begin_step=1, end_step=5, every=2)
        if kind == "structured":
            config = replace(HALF, pattern="structured", solver="osscar", sparsity=0.5)
            return MoonshotCallback(config, begin_step=1, end_step=5, every=2)
        return MoonshotCallback(teacher=make("llama") if kind == "teacher" else None)

    def model():
        return pruned() if kind in ("keep", "teacher") else make("llama").train()

    settings = dict(save_strategy="steps", save_steps=first_save, num_train_epochs=2, max_steps=-1)
    settings["per_device_train_batch_size"] = 8  # 4 steps an epoch
    whole = trainer(tmp_path, model(), make_callback(), **settings)
    whole.train()
    resumed = trainer(tmp_path, model(), make_callback(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{first_save}"))
    assert same(whole.model, resumed.model)
    fields = ("loss", "moonshot_sparsity", "moonshot_loss")
    history = [
        [{key: entry.get(key) for key in fields} for entry in run.state.log_history if "loss" in entry]
        for run in (whole, resumed)
    ]
    assert history[0] == history[1] and len(history[0]) == 8
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert "moonshot_sparsity" in state["log_history"][-1]


def test_a_weight_that_is_zero_at_a_checkpoint_stays_zero(tmp_path):
    """A run that resumes from the checkpoint has only its zeros as the mask."""

    class Zero(hf.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                row = model.model.layers[0].mlp.up_proj.weight.data[0]
                self.place = int(row.nonzero()[0])
                row[self.place] = 0

    for changes in ({"save_strategy": "steps", "save_steps": 3}, {}):
        model, zero = pruned(), Zero()
        trainer(tmp_path, model, MoonshotCallback(), zero, **changes).train()
        assert (model.model.layers[0].mlp.up_proj.weight[0, zero.place] == 0) == bool(changes)


@pytest.mark.parametrize("schedule", [{"begin_step": 3}, {"begin_step": 1, "end_step": 4, "every": 3}], ids=str)
def test_the_best_model_is_one_from_after_the_last_pruning(schedule, tmp_path):
    """The metric falls from evaluation to evaluation, so that the dense model would win."""
    values = iter(range(100, 0, -1))
    settings = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1)
    settings |= dict(load_best_model_at_end=True, metric_for_best_model="quality", greater_is_better=True)
    evaluated = partial(hf.Trainer, eval_dataset=samples(4), compute_metrics=lambda _: {"quality": next(values)})
    callback = MoonshotCallback(HALF, **schedule)
    run = trainer(tmp_path, make("llama"), callback, cls=evaluated, **settings)
    run.train()
    assert run.state.best_global_step == max(callback.schedule) + 1
    assert callback.masks.sparsity() == pytest.approx(0.6, abs=0.01)


def test_restoring_a_checkpoint_from_before_the_pruning_is_an_error(tmp_path):
    model = make("llama")
    callback = MoonshotCallback(CONFIG, begin_step=2)

    class Restore(hf.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == args.max_steps:
                model.load_state_dict(make("llama").state_dict())

    with pytest.raises(MoonshotError, match="removed weights are not zero.*checkpoint from before the pruning"):
        trainer(tmp_path, model, callback, Restore()).train()


def test_invalid_requests_are_refused_at_the_start(tmp_path):
    with pytest.raises(MoonshotError, match="no layer of the model is pruned"):
        trainer(tmp_path, make("llama"), MoonshotCallback()).train()
    with pytest.raises(MoonshotError, match="before step 6 is never reached: the training has 6 steps"):
        trainer(tmp_path, make("llama"), MoonshotCallback(CONFIG, begin_step=6)).train()
    for wrong, message in [
        (dict(config="2:4"), "config is a str"),
        (dict(config=CONFIG, begin_step=-1), "begin_step=-1"),
        (dict(config=HALF, begin_step=3, end_step=2, every=1), "end_step=2"),
        (dict(config=HALF, end_step=2), "every=None"),
        (dict(config=HALF, every=2), "every=2: it needs end_step"),
        (dict(config=HALF, end_step=4, every=0), "every=0"),
        (dict(config=CONFIG, end_step=4, every=2), "pattern='2:4': it has one sparsity"),
        (dict(config=replace(HALF, allocation="owl"), end_step=4, every=2), "allocation='owl'"),
        (dict(config=replace(HALF, allocation={"attn": 0.2}), end_step=4, every=2), "allocation={'attn'"),
        (dict(begin_step=3), "config=None: nothing is pruned"),
        (dict(config=HALF, end_step=4, every=2, calibration=iter(())), "an iterator is enough for one pruning only"),
        (dict(config=HALF, targets=("mlp",)), "give them to MoonshotConfig"),
        (dict(targets="mlp"), "targets='mlp': give a list"),
        (dict(teacher="dense"), "teacher is a str"),
        (dict(teacher=make("llama"), temperature="2"), "temperature='2'"),
        (dict(teacher=make("llama"), teacher_weight=None), "teacher_weight=None"),
        (dict(teacher=make("llama"), temperature=0), "temperature=0"),
        (dict(teacher=make("llama"), teacher_weight=1.5), "teacher_weight=1.5"),
    ]:
        with pytest.raises(MoonshotError, match=message):
            MoonshotCallback(**wrong)
    late = dict(begin_step=5)
    with pytest.raises(MoonshotError, match="num_samples=6: the training data has 4 samples"):
        trainer(tmp_path, make("llama"), MoonshotCallback(CONFIG, **late), data=samples(4)).train()
    with pytest.raises(MoonshotError, match='"nowhere.txt" is neither the name of a data set nor a file'):
        trainer(tmp_path, make("llama"), MoonshotCallback(CONFIG, **late, calibration="nowhere.txt")).train()
    with pytest.raises(MoonshotError, match="targets: 'nowhere' matches no module name"):
        trainer(tmp_path, make("llama"), MoonshotCallback(replace(CONFIG, targets=["nowhere"]), **late)).train()


def hooks_of(model):
    return len(model._forward_hooks) + sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())


def test_a_failure_of_the_callback_leaves_no_hook(tmp_path):
    dense = make("llama")
    with pytest.raises(MoonshotError, match="no layer of the model is pruned"):
        trainer(tmp_path, dense, MoonshotCallback(teacher=make("llama"))).train()
    assert not hooks_of(dense)
    callback = MoonshotCallback(HALF, end_step=4, every=2, teacher=make("llama"))

    class Break(hf.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                assert hooks_of(model) == 22
                model.model.layers[0].mlp.up_proj.weight.data[0] = float("nan")

    with pytest.raises(MoonshotError, match="up_proj: its weight holds NaN"):
        trainer(tmp_path, dense, callback, Break()).train()
    assert not hooks_of(dense)


def test_detach_removes_the_hooks_of_an_interrupted_training(tmp_path):
    class Interrupt(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    model, callback = pruned(), MoonshotCallback(teacher=make("llama"))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, model, callback, Interrupt()).train()
    assert hooks_of(model) == 22
    callback.detach()
    assert not hooks_of(model)


def test_training_that_ends_before_the_pruning_is_an_error(tmp_path):
    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    with pytest.raises(MoonshotError, match="ended at step 1, before the pruning at step 3"):
        trainer(tmp_path, make("llama"), MoonshotCallback(CONFIG, begin_step=3), Stop()).train()


def test_calibration_samples_are_drawn_at_random_through_the_collator():
    class Loader:
        dataset = [{"x": i} for i in range(20)]

        @staticmethod
        def collate_fn(chunk):
            return {"input_ids": torch.tensor([[each["x"]] * 3 for each in chunk])}

    def drawn(seed):
        return [int(row[0]) for batch in training_inputs(Loader, 6, seed) for row in batch["input_ids"]]

    assert sorted(drawn(0)) == list(range(20)) and drawn(0) == drawn(0) != drawn(1)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": i} for i in range(20)])

    Loader.dataset = Stream()
    assert drawn(0) == list(range(20))


def test_trl(tmp_path, tokenizer):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": sample["input_ids"].tolist()} for sample in samples()]
    settings = dict(max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True)

    def train(model, callback, **changes):
        data = datasets.Dataset.from_list(rows)
        arguments = trl.SFTConfig(output_dir=str(tmp_path), save_strategy="no", logging_steps=1, **settings, **changes)
        run = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback])
        run.train()
        assert run.state.log_history[-1]["moonshot_sparsity"] == 0.5
        assert all(layer.matrix.count_nonzero() * 2 == layer.matrix.numel() for layer in find_pruned(model))

    train(pruned(), MoonshotCallback())
    train(make("llama"), MoonshotCallback(CONFIG, begin_step=2))
    train(make("llama"), MoonshotCallback(CONFIG, begin_step=2), packing=True, max_length=24)
    with pytest.raises(MoonshotError, match="SFTTrainer forms no logits"):
        train(pruned(), MoonshotCallback(teacher=make("llama")))
