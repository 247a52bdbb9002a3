"""The weight stream of a packed checkpoint for other loaders, and repacking of shards: without vLLM."""

import configparser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import pruned, tensors
from safetensors import safe_open
from torch.nn import functional

from optimum_moonshot import MoonshotError, convert
from optimum_moonshot.checkpoint.weight_files import Description
from optimum_moonshot.integrations.conversion import unpacked
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.runtime.packed_module import find_pattern, pack_if_smaller

ROOT = Path(__file__).parents[2]


def described(folder):
    """The packed weights of all files."""
    layers = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            layers |= Description.read(file.metadata()).layers
    return layers


def dense_tensors(folder, tmp_path):
    convert(folder, tmp_path / "dense", "dense")
    return tensors(tmp_path / "dense")


@pytest.mark.parametrize("order", [sorted, lambda pairs: sorted(pairs)[::-1]], ids=["sorted", "reversed"])
@pytest.mark.parametrize("prefix", ["", "tower."])
def test_the_stream_is_that_of_the_dense_checkpoint(packed, tmp_path, order, prefix):
    folder, _ = packed
    stream = [(prefix + name, tensor) for name, tensor in order(tensors(folder).items())]
    pairs = list(unpacked(stream, lambda: described(folder), prefix))
    expected = dense_tensors(folder, tmp_path)
    assert sorted(name for name, _ in pairs) == sorted(prefix + name for name in expected)
    for name, tensor in pairs:
        dense = expected[name.removeprefix(prefix)]
        assert tensor.dtype == dense.dtype and torch.equal(tensor, dense), name


def test_a_transposed_weight_is_transposed_in_the_stream(tmp_path):
    pruner = pruned("gpt2", pattern="unstructured", sparsity=0.7)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    layers = described(tmp_path / "packed")
    weights = dict(unpacked(tensors(tmp_path / "packed").items(), lambda: layers))
    assert any(layer.transposed for layer in layers.values())
    state = pruner.model.state_dict()
    assert all(
        torch.equal(weights[name], state[f"transformer.{name}" if name not in state else name]) for name in layers
    )


def test_other_tensors_pass_unchanged():
    plain = [("a.weight", torch.ones(1)), ("a.bias", torch.ones(1))]
    assert list(unpacked(plain, lambda: pytest.fail("it looked for packed weights"))) == plain
    others = [("a.weight_packed", torch.ones(1)), ("a.weight_scale", torch.ones(1))]  # compressed-tensors' names
    assert list(unpacked(others, dict)) == others


def test_an_incomplete_weight_is_an_error(packed):
    folder, _ = packed
    layers = described(folder)
    name = next(iter(layers))
    stream = {stored: tensor for stored, tensor in tensors(folder).items() if stored != f"{name}_meta"}
    with pytest.raises(MoonshotError, match=rf"^{name.removesuffix('.weight')}: not all of its packed tensors"):
        list(unpacked(stream.items(), lambda: layers))


def sparse(d_out, d_in, pattern=None, sparsity=0.7, dtype=torch.bfloat16):
    """A random weight with zeros."""
    torch.manual_seed(0)
    weight = torch.randn(d_out, d_in)
    if pattern is None:
        return (weight * (torch.rand(d_out, d_in) >= sparsity)).to(dtype)
    keep = torch.rand(d_out, d_in // pattern.m, pattern.m).argsort(-1) < pattern.n
    return (weight * keep.view(d_out, d_in)).to(dtype)


def product(weight, inputs):
    """The product of the packed weight, compared with that of the dense one."""
    bias, shape = torch.randn(len(weight)).to(weight.dtype), tuple(weight.shape)
    codec, parts = pack_if_smaller(weight)
    codec.check(parts, shape, weight.dtype)
    assert torch.equal(codec.unpack(parts, shape), weight)
    output = codec.linear(inputs, parts, shape, bias, codec.plan(parts, shape))
    torch.testing.assert_close(output, functional.linear(inputs, weight, bias))
    return output - bias


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(4, 8), NM(3, 8), NM(8, 16), NM(16, 32)], ids=str)
def test_n_of_m_is_detected(pattern):
    weight = sparse(80, 64, pattern)
    assert find_pattern(weight) == pattern
    values, _ = pack_if_smaller(weight).parts.values()
    assert values.shape == (80, 64 * pattern.n // pattern.m)


def test_a_few_further_zeros_keep_n_of_m():
    weight = sparse(80, 64, NM(2, 4))
    weight[3, :20] = 0
    assert find_pattern(weight) == NM(2, 4)
    weight[5:20] = 0  # now storing only the nonzeros takes fewer bytes
    assert find_pattern(weight) is None


def test_one_dense_row_prevents_n_of_m():
    weight = sparse(800, 64, NM(2, 4))
    weight[700, :64] = 1
    assert find_pattern(weight) is None
    (values, _), codec = pack_if_smaller(weight).parts.values(), pack_if_smaller(weight).codec
    assert values.ndim == 1 and torch.equal(codec.unpack(pack_if_smaller(weight).parts, (800, 64)), weight)


def test_weights_that_packing_does_not_shrink_stay_dense():
    assert pack_if_smaller(sparse(80, 64, sparsity=0.0)) is None
    assert pack_if_smaller(sparse(80, 64, sparsity=0.03)) is None  # one bit per weight is 1/16 of 16 bits
    assert pack_if_smaller(sparse(80, 64, sparsity=0.15)) is not None
    assert pack_if_smaller(torch.zeros(80, 64)) is not None


@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=["0.7", "2:4"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_a_weight_give_the_product_of_the_whole(pattern, ranks):
    weight, inputs = sparse(48, 96, pattern, dtype=torch.float32), torch.randn(5, 96)
    whole = functional.linear(inputs, weight)
    rows = [product(part, inputs) for part in weight.chunk(ranks)]
    torch.testing.assert_close(torch.cat(rows, -1), whole)
    columns = [product(part, its) for part, its in zip(weight.chunk(ranks, 1), inputs.chunk(ranks, 1), strict=True)]
    torch.testing.assert_close(sum(columns), whole)
    uneven = [slice(0, 50), slice(50, 96)]  # within a group of 4
    torch.testing.assert_close(sum(product(weight[:, part], inputs[:, part]) for part in uneven), whole)


def test_merged_weights_give_the_products_of_each():
    inputs = torch.randn(5, 64)
    weights = [sparse(32, 64, NM(2, 4)), sparse(16, 64, NM(2, 4)), sparse(16, 64, sparsity=0.6)]
    weights = [weight.float() for weight in weights]
    assert find_pattern(torch.cat(weights[:2])) == NM(2, 4) and find_pattern(torch.cat(weights)) is None
    for count in (2, 3):
        merged = product(torch.cat(weights[:count]), inputs)
        torch.testing.assert_close(merged, torch.cat([functional.linear(inputs, each) for each in weights[:count]], -1))


def test_the_vllm_entry_point_exists():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    name, target = settings["options.entry_points"]["vllm.general_plugins"].strip().split(" = ")
    module, function = target.split(":")
    assert name == "moonshot" and f"def {function}()" in Path(find_spec(module).origin).read_text(encoding="utf-8")
