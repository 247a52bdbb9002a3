"""Rotation and self-calibration of a model whose decoder layers are on disk: one layer in memory at a time."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from marks import slow_but
from models import CAUSAL, GROUPED, make, spread, token_batches
from offloaded_models import assert_equal, tensors
from safetensors.torch import load_file

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.__main__ import main
from optimum_moonshot.data.text import SelfCalibration
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.model.structured_groups import find_structured_groups, probe_inputs
from optimum_moonshot.model.weights import is_offloaded
from optimum_moonshot.rotate.spaces import find_all_spaces

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
OPTIONS = {"pattern": "2:4", "num_samples": 4, "sequence_length": 12, "batch_size": 2, "lam": 0.5}
ROTATED = {**OPTIONS, "rotation": "learned", "rotation_steps": 2}
FEW = ("llama", "gpt2", "mixtral")  # the others take too long for every run


def shaken(name):
    """A model whose norms have random gains and shifts."""
    model = make(name)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


def pruned(folder, place, to):
    """The weights after a run, or the message of its error."""
    pruner = MoonshotPruner.from_pretrained(folder, MoonshotConfig(**ROTATED), offload=place)
    try:
        pruner.prune(token_batches(samples=4), progress=False)
    except MoonshotError as error:
        return str(error)
    pruner.save_pretrained(to)
    return tensors(to)


def assert_same(actual, expected):
    if isinstance(expected, str):
        assert actual == expected
    else:
        assert actual.keys() == expected.keys()
        assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("name", slow_but(FEW, CAUSAL))
def test_offloading_gives_the_same_basis_with_one_layer_onloaded(name, tmp_path, onloads):
    shaken(name).save_pretrained(tmp_path / "dense")
    expected = pruned(tmp_path / "dense", None, tmp_path / "memory")
    assert_same(pruned(tmp_path / "dense", "disk", tmp_path / "disk"), expected)
    assert onloads.most == 1
    assert name not in FEW or not isinstance(expected, str)


@pytest.mark.parametrize("name", ["llama", "mixtral", "bloom"])
def test_offloading_gives_the_same_spaces_and_structured_groups(name, tmp_path, onloads):
    shaken(name).save_pretrained(tmp_path)
    structures = []
    for place in (None, "disk"):
        model = MoonshotPruner.from_pretrained(tmp_path, MoonshotConfig(**OPTIONS), offload=place).model
        batch = probe_inputs(model)
        spaces, refused = find_all_spaces(model, batch, False)
        units, why = find_structured_groups(model, batch)
        places = [
            (space.name, space.width, [(at.at.name, at.at.axis, str(at.index)) for at in space.places])
            for space in spaces
        ]
        foldings = [(folding.norm.gain, len(folding.readers)) for space in spaces for folding in space.foldings]
        structures.append(
            (str((places, foldings, refused, why)), {name: unit.columns.tolist() for name, unit in units.items()})
        )
    assert structures[1] == structures[0] and onloads.most == 1
    assert is_offloaded(model) and all(p.is_meta for _, block in find_blocks(model) for p in block.parameters())


def test_a_failed_rotation_keeps_the_weights(tmp_path, monkeypatch):
    shaken("llama").save_pretrained(tmp_path)
    pruner = MoonshotPruner.from_pretrained(tmp_path, MoonshotConfig(**ROTATED), offload="disk")
    ids = torch.arange(10)[None]
    before = pruner.model(ids).logits
    for step in ("check_invariance", "gather", "learn", "check_same"):
        with monkeypatch.context() as patch:

            def fail(*_, **__):
                raise KeyboardInterrupt

            patch.setattr(f"optimum_moonshot.rotate.run.{step}", fail)
            with pytest.raises(KeyboardInterrupt):
                pruner.prune(token_batches(samples=4), progress=False)
        assert torch.equal(pruner.model(ids).logits, before)


WANDA = {**OPTIONS, "solver": "wanda"}


@pytest.mark.parametrize(
    "settings", [ROTATED, WANDA, {**WANDA, "targets": ["lm_head", r"layers\.1\."]}], ids=["rotated", "tied", "targeted"]
)
def test_a_tied_head_on_disk_is_pruned_and_rotated_as_in_memory(settings, tmp_path):
    torch.manual_seed(0)
    model = spread(hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "tie_word_embeddings": True})))
    model.model.norm.weight.data += 0.3 * torch.randn(model.model.norm.weight.shape)
    model.save_pretrained(tmp_path / "dense")
    device_map = {"model.embed_tokens": "disk", "model.norm": "disk", "lm_head": "disk", "model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{place}": "disk" for place in range(3)}
    weights, outputs = [], []
    for number, options in enumerate(({}, {"device_map": device_map, "offload_folder": str(tmp_path / "folder")})):
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "dense", **options)
        if not runs(loaded):
            pytest.skip("this release of transformers cannot run such a model: it takes one weight on disk for another")
        pruner = MoonshotPruner(loaded, MoonshotConfig(**settings))
        pruner.prune(token_batches(samples=4), progress=False)
        assert "rotation" not in settings or pruner.report.rotation.untied_bytes
        outputs.append(pruner.model(torch.arange(10)[None]).logits)
        pruner.save_pretrained(tmp_path / str(number))
        weights.append(load_file(tmp_path / str(number) / "model.safetensors"))
    assert ("lm_head.weight" in weights[0]) == ("rotation" in settings)
    assert_same(weights[1], weights[0])
    assert torch.equal(outputs[1], outputs[0])


def runs(model):
    """Whether the forward of a dense model succeeds."""
    try:
        model(torch.arange(10)[None])
    except RuntimeError:
        return False
    return True


def test_self_calibration_samples_do_not_depend_on_offloading(tmp_path, onloads):
    shaken("llama").save_pretrained(tmp_path)
    source, digests = SelfCalibration(), []
    for place in (None, "disk"):
        pruner = MoonshotPruner.from_pretrained(
            tmp_path, MoonshotConfig(**{**OPTIONS, "solver": "wanda"}), offload=place
        )
        digests.append(pruner.prune(source, progress=False).calibration["digest"])
    assert digests[0] == digests[1] and onloads.most == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("rotate", "--rotation-steps", "2", "--pattern", "2:4"),
        ("sweep", "--lambdas", "0.5", "1", "--patterns", "2:4", "--save"),
    ],
)
def test_commands_keep_layers_on_disk(command, tmp_path, onloads):
    arguments = [command[0], str(DEMO), "--calibration", str(DEMO / "calibration.txt"), "--num-samples", "4"]
    arguments += ["--sequence-length", "32", *command[1:]]
    for name, place in (("memory", []), ("disk", ["--offload", "disk"])):
        main([*arguments, "--output", str(tmp_path / name), *place])
        assert onloads.most == (1 if place else 0)
    files = [sorted((tmp_path / name).rglob("*.safetensors")) for name in ("disk", "memory")]
    assert_same(*(load_file(path) for (path,) in files))


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["one-shot", "recovered"])
@pytest.mark.parametrize(("name", "goal"), [("llama", 0.6), ("mixtral", "2:4")])
def test_recipes_give_the_same_files_with_offloading(name, goal, budget, tmp_path):
    shaken(name).save_pretrained(tmp_path / "dense")
    fields = {key: OPTIONS[key] for key in ("num_samples", "sequence_length", "batch_size")} | {"rotation_steps": 2}
    fields |= {"recover_steps": 3} if budget == "recovered" else {}
    for place in (None, "disk"):
        config = MoonshotConfig.recipe(goal, budget=budget, **fields)
        pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", config, offload=place)
        pruner.prune(token_batches(samples=4), progress=False)
        pruner.save_pretrained(tmp_path / str(place))
    assert_equal(tmp_path / "disk", tmp_path / "None")
