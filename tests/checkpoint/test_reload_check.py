"""A saved model is complete: plain `from_pretrained` finds every weight, and no incomplete folder appears."""

from functools import partial

import architectures
import pytest
import reloads
import torch
from checkpoints import pruned as pruned_llama
from checkpoints import tensors
from marks import slow_but
from models import make, token_batches
from offloaded_models import offloaded
from rotation_runs import pruner as rotating
from torch import nn

from optimum_moonshot import MoonshotError

EVERY = {name: (kind, family) for kind, family, name in architectures.families(list(architectures.KINDS))}
HEADS = [f"{family}For{task}" for family in ("MegatronBert", "XLMRobertaXL") for task in ("CausalLM", "MaskedLM")]


def assert_reloads(name, dtype, rotated):
    try:
        result = reloads.reload(*EVERY[name], name, dtype, rotated)
    except MoonshotError as error:  # its inputs are of another kind, or nothing can be rotated or pruned
        pytest.skip(str(error))
    if "not made" in result:
        pytest.skip(result["not made"])
    assert not reloads.failed(result), result
    return result


@pytest.mark.parametrize("name", slow_but(["MegatronBertForCausalLM", "XLMRobertaXLForMaskedLM"], HEADS))
def test_an_untied_head_keeps_its_bias(name):
    """transformers ties it to another parameter of the head together with the embeddings."""
    result = assert_reloads(name, "bfloat16" if "Causal" in name else "float32", rotated=True)
    assert result["untied bytes"] and all(result[format] == {"difference": 0} for format in reloads.FORMATS)


# Each family in both dtypes, rotated in one of them, by turns, and in one of the two before a release alone;
# benchmarks/reloads.py tests all four.
SETTINGS = [
    pytest.param(
        *(name, reloads.DTYPES[(number + rotated) % 2], rotated),
        marks=[pytest.mark.release] if rotated == (number % 4 < 2) else [],
    )
    for number, name in enumerate(EVERY)
    for rotated in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "rotated"), SETTINGS)
def test_every_family_reloads(name, dtype, rotated):
    assert_reloads(name, dtype, rotated)


def assert_refused(save, folder, message):
    """The save fails with a message, and leaves the earlier files of the folder as they were."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"an earlier model")
    with pytest.raises(MoonshotError, match=message):
        save(folder)
    assert [path.name for path in folder.iterdir() if path.suffix != ".lock"] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"an earlier model"


def without_a_norm(model):
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    return r"model\.norm\.weight would be missing in the files, and random in a loaded model"


def with_another_parameter(model):
    model.model.extra = nn.Parameter(torch.ones(3))
    return r"model\.extra would be in a file, and missing in a loaded model"


def of_another_shape(model):
    model.config.intermediate_size = 16
    return r"model\.layers\.0\.mlp\.down_proj\.weight, .* and 6 others would have another shape than config.json says"


DAMAGE = [without_a_norm, with_another_parameter, of_another_shape]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_an_incomplete_model_is_not_saved(damage, format, tmp_path):
    pruner = pruned_llama(pattern="2:4")
    message = damage(pruner.model)
    assert_refused(partial(pruner.save_pretrained, format=format), tmp_path / "saved", message)


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_incomplete_model_that_is_packed_in_memory_is_not_saved(damage, tmp_path):
    pruner = pruned_llama(pattern="2:4")
    pruner.to_runtime("packed")
    message = damage(pruner.model)
    for format in reloads.FORMATS:
        for name, save in (("pruner", pruner.save_pretrained), ("model", pruner.model.save_pretrained)):
            assert_refused(partial(save, format=format), tmp_path / f"{name}-{format}", message)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_an_incomplete_offloaded_model_is_not_saved(format, tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    pruner = offloaded(tmp_path / "dense", lam=1.0)
    pruner.prune(token_batches(), progress=False)
    message = without_a_norm(pruner.model)
    assert_refused(partial(pruner.save_pretrained, format=format), tmp_path / "saved", message)


def test_an_incomplete_rotated_model_is_not_saved(tmp_path):
    pruner = rotating()
    pruner.rotate(token_batches(), progress=False)
    message = without_a_norm(pruner.model)
    assert_refused(pruner.save_pretrained, tmp_path / "saved", message)


def test_weights_that_a_class_allows_to_be_missing_may_be(tmp_path):
    pruner = pruned_llama(pattern="2:4")
    without_a_norm(pruner.model)
    pruner.model.__class__ = type(
        "Llama", (type(pruner.model),), {"_keys_to_ignore_on_load_missing": [r"norm\.weight"]}
    )
    pruner.save_pretrained(tmp_path)
    assert "model.norm.weight" not in tensors(tmp_path) and "model.layers.0.mlp.up_proj.weight" in tensors(tmp_path)
