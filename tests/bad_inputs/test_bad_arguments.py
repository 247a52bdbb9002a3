"""Bad calibration data, losses and other arguments of a run: one line each, and the model does not change."""

import re
from functools import partial

import pytest
import torch
from datasets import Dataset
from invalid_inputs import BATCHES, NAN, config, one_line
from models import make
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner

IDS = torch.ones(2, 8, dtype=torch.long)


def broken_off():
    yield BATCHES[0]
    raise RuntimeError("the network is gone")


class Broken:
    def __iter__(self):
        raise OSError("the disk is gone")


def keys_of(*names):
    return {name: IDS for name in names}


DATA = [
    ([], "the data is an empty list; use c4"),
    (iter([]), "num_samples=4: the data has 0 samples; give more"),
    ({}, "item 0 of the data is empty"),
    (broken_off(),
     "item 1 of the data cannot be read (RuntimeError: the network is gone); fix the code that produces it"),
    (Broken(), "item 0 of the data cannot be read (OSError: the disk is gone)"),
    ([keys_of("input_ids"), keys_of("input_ids", "token_type_ids")],
     "item 1 of the data has input_ids, token_type_ids, item 0 input_ids; give all the same inputs"),
    ([keys_of("input_ids", "labels"), keys_of("input_ids")], "item 1 of the data has input_ids, item 0 input_ids, lab"),
    ([keys_of("foo")] * 2, "LlamaForCausalLM cannot be called with foo [1, 8]"),
    ([{"input_ids": torch.ones(2, 3, 4).long()}] * 2, "LlamaForCausalLM cannot be called with input_ids [1, 3, 4]"),
    ([{"input_ids": torch.rand(2, 3)}] * 2, "input_ids: token ids are torch.float32; use integers"),
    ([{"input_ids": IDS * 10**6}] * 2, "token 1000000 is outside of the vocabulary of LlamaForCausalLM, which has"),
    ([{"input_ids": -IDS}] * 2, "token -1 is outside"),
    ([{"input_ids": IDS.to_sparse()}], "input_ids is of layout torch.sparse_coo; give a dense tensor"),
    ([{"input_ids": IDS.to("meta")}], "item 0 of the data: input_ids: give a tensor"),
    ([{"input_ids": IDS[:0]}], "which is empty; leave it out"),
    ([{"inputs_embeds": torch.full((2, 3, 16), NAN)}], "inputs_embeds contains NaN; give finite numbers"),
    ([{"input_ids": IDS, "attention_mask": IDS[:, :5]}],
     "attention_mask of (2, 5) for input_ids of (2, 8); give one entry for each token"),
    ([{"input_ids": IDS, "attention_mask": IDS * 0}],
     "attention_mask hides all tokens of a sample; leave that sample out"),
    ([{"input_ids": IDS, "labels": IDS * 0 - 100}] * 2, "num_samples=4: the data has 0 samples with a label, and 4"),
    (Dataset.from_dict({"id": ["a"], "turns": [["b"]]}),
     "the data has the columns id, turns; rename the column with text to text, or with conversations to messages"),
    (Dataset.from_dict({"messages": [[{"role": "user", "content": "a"}]] * 4}),
     "tokenizer=None: text calibration needs one; give the model's tokenizer, or save it in the model's folder"),
    ("lorem ipsum " * 10_000, '"lorem ipsum lorem ipsum'),
    ("a\0b", "is neither the name of a data set nor a file"),
    ("wikitext3", '"wikitext3" is neither the name of a data set nor a file; use c4, wikitext2'),
    ("~nobody-of-this-name/a.txt", '"~nobody-of-this-name/a.txt" is neither'),
    ("nowhere/at-all", '"nowhere/at-all" is neither'),
    (5, "data of type int; use c4"),
    (lambda: BATCHES, "data of type function; use c4"),
    ({1, 2}, "item 0 of the data is a int; give dictionaries"),
    (["text"], "tokenizer=None: text calibration needs one"),
    (None, "calibration"),
]  # fmt: skip
LOSSES = [
    (lambda output, batch: torch.zeros(len(batch["input_ids"])), "has no gradient; compute it from the output"),
    (lambda output, batch: output.logits.detach().mean((1, 2)), "loss: its result has no gradient"),
    (lambda output, batch: torch.ones(1, requires_grad=True), "loss: its result has no gradient"),
    (
        lambda output, batch: 1.0,
        "loss: it returned a float; return one loss per sample, a floating-point tensor of shape [1]",
    ),
    (lambda output, batch: None, "loss: it returned a NoneType"),
    (lambda output, batch: output.logits.mean(), "loss: it returned shape []; return one loss per sample"),
    (lambda output, batch: output.logits.mean(2), "loss: it returned shape [1, 12]"),
    (lambda output, batch: output.logits.mean()[None, None], "loss: it returned shape [1, 1]"),
    (lambda output, batch: output.logits.mean((1, 2)) * NAN, "loss: it returned [nan]; check it"),
    (lambda output, batch: output.logits.mean((1, 2)) / 0, "inf]; check it"),
    (lambda output, batch: output.logits.mean((1, 2)).to(torch.complex64), "loss: it returned torch.complex64"),
    (lambda output, batch: torch.zeros(1, dtype=torch.long), "loss: it returned torch.int64"),
    ("cross-entropy", "loss='cross-entropy': give a function"),
]
ARGUMENTS = [
    *(({"calibration": data}, words) for data, words in DATA),
    *(({"loss": loss, "lam": 0.5}, words) for loss, words in LOSSES),
    ({"forward": "forward"}, "forward='forward': pass a function of model and inputs"),
    ({"forward": lambda model, batch: None}, "no calibration data reached any chosen layer"),
    ({"targets": ["nothing"]}, "targets: 'nothing' matches no module name"),
    ({"ignore": [".*"]}, "nothing to prune: `targets` and `ignore` leave nothing"),
    ({"max_memory": 1}, "max_memory: model.layers.0"),
    ({"resume_dir": 5}, "resume_dir=5: give a path"),
    ({"resume_dir": ""}, "resume_dir='': give a path"),
    ({"resume_dir": "a\0b"}, "resume_dir='a\\x00b': give a path"),
    ({"resume_dir": "x" * 260}, "cannot be written: [Errno 36] File name too long"),
    ({"resume_dir": "FILE"}, "is a file; give a folder"),
    ({"resume_dir": "FILE/in"}, "cannot be written: [Errno 20] Not a directory"),
    ({"resume_dir": "LINK"}, "is a link to a folder that does not exist; create that folder, or give another"),
    ({"offload_dir": "FILE", "max_memory": 1}, "offload_dir="),
]


@pytest.mark.parametrize("arguments, words", ARGUMENTS, ids=[words[:50] for _, words in ARGUMENTS])
def test_arguments_of_a_run(tmp_path, monkeypatch, arguments, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    places = {"FILE": tmp_path / "file", "FILE/in": tmp_path / "file" / "in", "LINK": tmp_path / "link"}
    monkeypatch.setattr("optimum_moonshot.calibration.storage.DEFAULT_SHARE", 0.0 if "max_memory" in arguments else 0.6)
    arguments = {"calibration": BATCHES, "progress": False, **arguments}
    arguments = {k: places.get(v, v) if isinstance(v, str) else v for k, v in arguments.items()}
    settings = {name: arguments.pop(name) for name in list(arguments) if name in MoonshotConfig.__dataclass_fields__}
    data = settings.pop("calibration")
    settings = {name: str(value) if name == "offload_dir" else value for name, value in settings.items()}
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        MoonshotPruner(model, config(**settings)).prune(data, **arguments)
    assert one_line(error.value) and len(str(error.value)) < 620
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not hasattr(model.config, "moonshot")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_an_error_in_a_loss_keeps_its_own_type():
    with pytest.raises(ZeroDivisionError):
        MoonshotPruner(make("llama"), config(lam=0.5)).prune(BATCHES, loss=lambda output, batch: 1 / 0, progress=False)


def test_a_batch_without_padding_needs_no_mask():
    data = [{"input_ids": IDS}, {"input_ids": IDS, "attention_mask": IDS}]
    MoonshotPruner(make("llama"), config()).prune(data, progress=False)


def meta(whole):
    model = make("llama")
    (model if whole else model.model.layers[0].mlp.up_proj).to("meta")
    return model


def compiled_inside():
    model = make("llama")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def expanded():
    model = make("llama")
    model.model.norm.weight = nn.Parameter(torch.ones(1).expand(16))
    return model


@torch.inference_mode()
def inference():
    return make("llama")


OBJECTS = [
    (partial(meta, True), "model.layers.0.self_attn.q_proj: its weight is on the meta device; load the model"),
    (partial(meta, False), "model.layers.0.mlp.up_proj: its weight is on the meta device"),
    (lambda: nn.Sequential(nn.ReLU()), "nothing to prune: the model has no Linear or Conv2d"),
    (nn.Sequential, "nothing to prune: the model has no Linear or Conv2d"),
    (lambda: "gpt2", "model is a str: give a PreTrainedModel"),
    (compiled_inside, "model: model.layers.0 was replaced by torch.compile(module), so its weights have other names"),
    (expanded, "model: entries of model.norm.weight share their memory, as after expand(); clone it"),
    (inference, "model: its weights were created inside torch.inference_mode(), and cannot be changed outside of it"),
]


@pytest.mark.parametrize("model, words", OBJECTS)
def test_models(model, words):
    with pytest.raises(MoonshotError, match=re.escape(words)):
        MoonshotPruner(model(), config()).prune(BATCHES, progress=False)
