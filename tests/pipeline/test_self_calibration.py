"""Calibration on what the dense model writes itself: how much, from where, always the same, kept over a kill."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
from command_line import DEMO, ROOT, failure
from models import make
from transformers import AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, SelfCalibration
from optimum_moonshot.__main__ import main
from optimum_moonshot.data.sources import file_rows
from optimum_moonshot.pipeline import calibration_data
from optimum_moonshot.pipeline import generated_samples as self_samples
from optimum_moonshot.pipeline.generated_samples import write_samples

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def written(monkeypatch):
    """What every call of the reader gave."""
    seen, original = [], self_samples.load_self

    def spy(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    monkeypatch.setattr(calibration_data, "load_self", spy)
    return seen


def config(**changes):
    defaults = dict(solver="wanda", pattern="2:4", lam=1.0, num_samples=5, sequence_length=12)
    return MoonshotConfig(**{**defaults, **changes})


def prune(model, calibration="self", tokenizer=None, resume_dir=None, **changes):
    pruner = MoonshotPruner(model, config(**changes), tokenizer)
    return pruner.prune(calibration, progress=False, resume_dir=resume_dir)


def ids(data):
    return torch.cat([batch["input_ids"] for batch in data.batches])


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon-alibi", "mixtral", "opt"])
def test_exactly_the_asked_tokens_from_the_bos_token(name, written):
    model = make(name)
    report = prune(model, num_samples=5, sequence_length=12, batch_size=2)
    found = ids(written[0])
    assert found.shape == (5, 12) and found.dtype == torch.int64 and (found[:, 0] == 1).all()
    assert [len(batch["input_ids"]) for batch in written[0].batches] == [2, 2, 1]
    assert all(set(batch) == {"input_ids"} for batch in written[0].batches)
    assert len(set(map(tuple, found.tolist()))) == 5
    assert report.calibration == {
        "source": "self (temperature 1, from its BOS token)",
        "num_samples": 5,
        "sequence_length": 12,
        "digest": written[0].digest,
    }


def test_the_same_seed_writes_the_same_and_moves_no_random_state(written):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = make("llama").train()
    torch.set_rng_state(before)
    own = model.generation_config
    for changes in ({}, {"batch_size": 1}, {"seed": 1}):
        prune(make("llama"), **changes)
    torch.set_rng_state(before)
    prune(model)
    assert torch.equal(torch.get_rng_state(), before) and model.generation_config is own
    assert all(module.training for module in model.modules())
    first, split, other, again = map(ids, written)
    assert torch.equal(first, split) and torch.equal(first, again) and not torch.equal(first, other)


def test_words_are_drawn_by_the_models_own_distribution():
    """Neither the model's settings for chats nor top_k, which transformers would fill in, cut it."""
    model = make("llama")
    model.generation_config.temperature, model.generation_config.repetition_penalty = 0.01, 5.0
    model.generation_config.eos_token_id = 7
    found = write_samples(model, [[1]], set(), SelfCalibration(batch_size=2000), 2000, 2, 0, False, [])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[1]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(found[:, 1], minlength=96) / 2000
    assert (counts - expected).abs().max() < 5 * (0.25 / 2000) ** 0.5
    assert int((counts > 0).sum()) > 60
    cold = write_samples(model, [[1]], set(), SelfCalibration(temperature=1e-3), 20, 2, 0, False, [])
    assert (cold[:, 1] == expected.argmax()).all()
    narrow = write_samples(model, [[1]], set(), SelfCalibration(top_p=0.2, batch_size=500), 500, 2, 0, False, [])
    few = set(
        expected.argsort(descending=True)[: int((expected.sort(descending=True).values.cumsum(0) < 0.2).sum()) + 1]
    )
    assert set(narrow[:, 1].tolist()) <= set(map(int, few))


def test_samples_go_on_with_the_next_beginning_where_a_text_ends():
    model = make("llama")
    ends = set(range(40, 96))  # most words end a text
    beginnings = [[1, 50, 51], [1, 60]]  # and prompts hold such words too
    found = write_samples(model, beginnings, ends, SelfCalibration(batch_size=3), 7, 30, 0, False, [])
    assert found.shape == (7, 30)
    used = Counter()
    for row in found.tolist():
        place = 0
        while place < len(row):
            start = next(tokens for tokens in beginnings if row[place : place + 2] == tokens[:2][: len(row) - place])
            used[tuple(start)] += 1
            assert row[place : place + len(start)] == start[: len(row) - place]
            place += len(start)
            while place < len(row) and row[place] not in ends:
                place += 1
            place += 1  # behind the word that ended it
    assert len(used) == 2 and abs(used[1, 60] - used[1, 50, 51]) <= 4


@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_pass_through_the_chat_template(thinking, tokenizer, written):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHAT
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    source = SelfCalibration(prompts=["who?", talk], thinking=thinking)
    tail = "<assistant><think>" if thinking else "<assistant>"
    wanted = [f"<user>who?{tail}", f"<system>be brief<user>why?{tail}"]
    found = source.beginnings(tokenizer, 0, 100)
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in wanted]
    plain = SelfCalibration(prompts=["who?"], chat=False).beginnings(tokenizer, 0, 100)
    assert plain == [tokenizer("who?")["input_ids"]]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_prompts_from_files(suffix, tokenizer, tmp_path):
    path, prompts = tmp_path / f"prompts{suffix}", ["who is he?", "why?\tso", "“so”"]
    if suffix == ".txt":
        path.write_text("\n".join(["", *prompts, " "]), encoding="utf-8")
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"id": 1, "prompt": text}) for text in prompts), encoding="utf-8")
    else:
        from datasets import Dataset

        Dataset.from_dict({"question": prompts}).to_parquet(path)
    source = SelfCalibration(prompts=str(path))
    assert source.beginnings(tokenizer, None, 100) == [tokenizer(text)["input_ids"] for text in prompts]
    assert source.describe() == f"self (temperature 1, from prompts of prompts{suffix})"
    assert len(list(file_rows(path))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0: it must be above 0"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 1.5}, "top_p=1.5: it must be above 0 and at most 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"thinking": "yes"}, "thinking='yes': use True, False or None"),
        ({"prompts": []}, r"prompts=\[\]: give a list"),
        ({"prompts": 5}, "prompts=5: give a list"),
        ({"prompts": [5]}, "prompts: 5 is neither a string nor a list of messages"),
        ({"prompts": [[{"role": "user"}]]}, "is neither a string nor a list of messages"),
        ({"prompts": "nowhere.txt"}, "prompts='nowhere.txt': no such file"),
    ],
)
def test_bad_values_are_refused_at_once(options, message):
    with pytest.raises(MoonshotError, match=message):
        SelfCalibration(**options)


def test_what_cannot_write_is_refused_before_any_work(tokenizer, tmp_path):
    for name in ("bert", "vit"):
        with pytest.raises(MoonshotError, match=r"calibration='self': .* writes no text from left to right"):
            prune(make(name), resume_dir=tmp_path / "run", sequence_length=None)
        assert not (tmp_path / "run").exists()
    with pytest.raises(MoonshotError, match="calibration='self': Sequential writes no text"):
        MoonshotPruner(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)]), config()).prune("self")
    model = make("llama")
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    before = state(model)
    with pytest.raises(MoonshotError, match="calibration='self': the model has no BOS token; give prompts"):
        prune(model)
    with pytest.raises(MoonshotError, match="tokenizer=None: prompts need one"):
        prune(model, SelfCalibration(prompts=["a"]))
    long = SelfCalibration(prompts=["a", "one two three " * 10])
    with pytest.raises(MoonshotError, match="prompts: number 1 has .* sequence_length=12 leaves none for an answer"):
        prune(model, long, tokenizer)
    with pytest.raises(MoonshotError, match="chat=True: the tokenizer has no chat template"):
        prune(model, SelfCalibration(prompts=["a"], chat=True), tokenizer)
    with pytest.raises(MoonshotError, match="number 0 is a conversation, which needs a chat template"):
        prune(model, SelfCalibration(prompts=[[{"role": "user", "content": "a"}]]), tokenizer)
    with pytest.raises(MoonshotError, match="sequence_length=65: give at most the 64 positions"):
        prune(make("llama"), sequence_length=65)
    for text, words in (("\n \n", "has no prompts"), ('{"a": "b"}', "rename the one with prompts to prompt")):
        path = tmp_path / ("p.txt" if text[0] == "\n" else "p.jsonl")
        path.write_text(text)
        with pytest.raises(MoonshotError, match=words):
            prune(model, SelfCalibration(prompts=path), tokenizer)
    assert same(model, before)


def test_a_template_that_refuses_says_which_prompt(tokenizer):
    refusing = AutoTokenizer.from_pretrained(DEMO)
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(MoonshotError, match="prompts: number 0 does not fit the chat template"):
        SelfCalibration(prompts=["a"]).beginnings(refusing, 0, 50)


def test_a_model_that_gives_no_probabilities_says_so():
    model = make("llama")
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(MoonshotError, match="calibration='self': LlamaForCausalLM cannot write"):
        prune(model, targets=[r"layers\.0\."])


@pytest.mark.parametrize("room", [1, 2, 3])
def test_fewer_samples_at_a_time_where_the_device_is_full(room, monkeypatch, written):
    model, sizes = make("llama"), []
    own = model.generate

    def generate(first, **options):
        sizes.append(len(first))
        if len(first) > room:
            options["logits_processor"][0](first, model(first).logits[:, -1])  # the first step
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(first, **options)

    model.generate = generate
    report = prune(model, SelfCalibration(batch_size=5), num_samples=7)
    assert sizes == {1: [5, 2] + [1] * 7, 2: [5, 2, 2, 2, 1], 3: [5, 2, 2, 2, 1]}[room]
    assert ids(written[0]).shape == (7, 12) and len({tuple(sample) for sample in ids(written[0]).tolist()}) > 1
    size = {1: 1, 2: 2, 3: 2}[room]
    (note,) = [note for note in report.notes if "out of memory" in note]
    assert f"the model wrote {size} samples at a time, not 5" in note


def test_no_memory_for_a_single_sample_leaves_the_model_as_it_was():
    model = make("llama")
    before = state(model)

    def generate(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.generate = generate
    with pytest.raises(MoonshotError, match="out of memory"):
        prune(model, SelfCalibration(batch_size=4))
    assert same(model, before)


def test_an_interrupted_run_writes_nothing_again(tmp_path, monkeypatch, written):
    from optimum_moonshot.solvers.wanda import Wanda

    whole, resumed = make("llama"), make("llama")
    full = prune(whole)
    original, count = Wanda.solve, [0]

    def die(self, *arguments):
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Wanda, "solve", die)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, resume_dir=tmp_path / "run")
    monkeypatch.setattr(self_samples, "write_samples", None)
    pruner = MoonshotPruner(resumed, config())
    report = pruner.prune("self", progress=False, resume_dir=tmp_path / "run")
    assert "the samples that the model wrote were taken over from an interrupted run" in report.notes
    assert any("3 layers were taken over" in note for note in report.notes)
    assert same(resumed, state(whole)) and report.calibration == full.calibration
    assert torch.equal(ids(written[0]), ids(written[-1]))
    pruner.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "run").exists()
    assert PruneReport.load(tmp_path / "out").calibration == full.calibration
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "5 samples of 12 tokens of self (temperature 1, from its BOS token), seed 0" in text


def test_other_settings_or_damage_write_anew(tmp_path, written):
    folder = tmp_path / "run"
    for changes in ({}, {"seed": 1}, {"seed": 1, "pattern": "1:4"}):
        prune(make("llama"), resume_dir=folder, **changes)
    first, other, kept = map(ids, written)
    assert not torch.equal(first, other) and torch.equal(other, kept)
    assert [any("samples that the model wrote" in note for note in data.notes) for data in written] == [
        False,
        False,
        True,
    ]
    prune(make("llama"), SelfCalibration(temperature=0.5), resume_dir=folder, seed=1)
    assert not torch.equal(ids(written[-1]), other)
    changed = make("llama")
    changed.model.layers[0].mlp.up_proj.weight.data *= 2
    prune(changed, SelfCalibration(temperature=0.5), resume_dir=folder, seed=1)
    assert not written[-1].notes
    (path,) = folder.glob("samples/samples/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    again = make("llama")
    again.model.layers[0].mlp.up_proj.weight.data *= 2
    report = prune(again, SelfCalibration(temperature=0.5), resume_dir=folder, seed=1)
    assert "damaged samples of an interrupted run were thrown away and written again" in report.notes
    assert torch.equal(ids(written[-1]), ids(written[-2]))


def test_files_of_others_are_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(self_samples, "write_samples", None)
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(MoonshotError, match="resume_dir=.*: contains other files"):
        prune(make("llama"), resume_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_sweeps_and_paths_keep_the_samples_too(tmp_path, written, monkeypatch):
    settings = config(solver="obc", pattern="unstructured", sparsity=0.5, lam=0.5, targets=[r"layers\.0\..*q_proj"])
    pruner = MoonshotPruner(make("llama"), settings)
    report = pruner.sweep("self", lambdas=[0.5, 1.0], progress=False, work_dir=tmp_path / "sweep")
    assert report.calibration["source"].startswith("self")
    monkeypatch.setattr(self_samples, "write_samples", None)
    again = MoonshotPruner(make("llama"), settings)
    report = again.sweep("self", lambdas=[0.5, 1.0], progress=False, work_dir=tmp_path / "sweep")
    assert [entry.metric for entry in report.entries] and len(written) == 2
    again.choose(report.best())
    again.save_pretrained(tmp_path / "out")
    assert not list((tmp_path / "sweep").glob("**/*.safetensors"))
    monkeypatch.undo()
    path = MoonshotPruner(make("llama"), settings).prune_path(
        "self", [0.5, 0.7], progress=False, work_dir=tmp_path / "p"
    )
    assert (tmp_path / "p" / "samples").is_dir()
    path.discard()
    assert not list(tmp_path.glob("p/**/*.safetensors"))


def test_a_configuration_holds_it(written):
    model = make("llama")
    source = SelfCalibration(temperature=0.8)
    report = MoonshotPruner(model, config(calibration=source)).prune(progress=False)
    assert report.calibration["source"] == "self (temperature 0.8, from its BOS token)"


KILLED = """
import os, signal, sys
from optimum_moonshot.__main__ import main
from optimum_moonshot.solvers.wanda import Wanda
Wanda.solve = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill(tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("It was\nShe had\n")
    options = ["--solver", "wanda", "--pattern", "2:4", "--lam", "1", "--targets", r"layers\.0\.", "--device", "cpu"]
    options += ["--num-samples", "4", "--sequence-length", "16", "--calibration", "self", "--temperature", "0.9"]
    argv = ["prune", str(DEMO), "--output", str(tmp_path / "out"), *options, "--prompts", str(prompts)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", KILLED, *argv], capture_output=True, text=True, env=environment)
    assert run.returncode == -signal.SIGKILL, run.stderr
    monkeypatch.setattr(self_samples, "write_samples", None)
    main(argv)
    report = PruneReport.load(tmp_path / "out")
    assert report.calibration["source"] == "self (temperature 0.9, from prompts of prompts.txt)"
    assert "the samples that the model wrote were taken over from an interrupted run" in report.notes
    assert {path.name for path in tmp_path.iterdir()} == {"out", "prompts.txt"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompts", "a.txt"], "--prompts: only for --calibration self"),
        (["--calibration", "c4", "--temperature", "1"], "--temperature: only for --calibration self"),
        (["--calibration", "c4", "--no-thinking"], "--thinking: only for --calibration self"),
        (["--calibration", "self", "--temperature", "0"], "--temperature 0.0: it must be above 0"),
        (["--calibration", "self", "--prompts", "nowhere.txt"], "--prompts nowhere.txt: no such file"),
    ],
)
@pytest.mark.parametrize("command", ["prune", "sweep"])
def test_wrong_options_are_found_before_loading(command, options, words, tmp_path, capsys):
    pattern = ["--pattern", "2:4"] if command == "prune" else ["--patterns", "2:4"]
    status, lines = failure(capsys, command, "no/such", "--output", str(tmp_path / "out"), *pattern, *options)
    assert status == 2 and len(lines) == 1 and words in lines[0]
