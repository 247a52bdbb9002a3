"""Bad matrices and settings: each raises one line with the field, the value and a hint."""

import re

import pytest
import torch
from invalid_inputs import LONG, NAN, config, one_line

from optimum_moonshot import MoonshotError, prune_weight
from optimum_moonshot import prune_weight_path as weight_path

WEIGHT, GRAM = torch.ones(8, 16), torch.eye(16)
GRADIENTS = torch.ones(2, 8, 16)
HALF, OBC = config(lam=0.5), {"solver": "obc", "pattern": "unstructured", "sparsity": 0.5}
MATRICES = [
    ((WEIGHT.to("meta"), GRAM), config(), "weight is on the meta device, which has no values"),
    ((WEIGHT, GRAM.to("meta")), config(), "gram is on the meta device"),
    ((WEIGHT, GRAM, GRADIENTS.to("meta")), HALF, "gradients is on the meta device"),
    ((WEIGHT.to_sparse(), GRAM), config(), "weight is of layout torch.sparse_coo: give a plain, dense tensor"),
    ((WEIGHT, GRAM.to_sparse_csr()), config(), "gram is of layout torch.sparse_csr"),
    ((WEIGHT, GRAM, GRADIENTS.to_sparse()), HALF, "gradients is of layout torch.sparse_coo"),
    ((torch.nested.nested_tensor([WEIGHT[0], WEIGHT[1]]), GRAM), config(), "weight is nested"),
    ((torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8), GRAM), config(), "weight is quantized"),
    ((WEIGHT.int(), GRAM), config(), "weight has dtype torch.int32: give a floating-point tensor"),
    ((WEIGHT.double(), GRAM), config(bits=4), "dtype=torch.float64: its weights cannot be quantized"),
    ((WEIGHT.to(torch.complex64), GRAM), config(), "weight has dtype torch.complex64"),
    ((WEIGHT, GRAM.bool()), config(), "gram has dtype torch.bool"),
    ((WEIGHT * NAN, GRAM), config(), "weight holds NaN or infinite values"),
    ((WEIGHT, GRAM / 0), config(), "gram holds NaN or infinite values"),
    ((WEIGHT, GRAM, GRADIENTS * NAN), HALF, "gradients holds NaN"),
    ((torch.zeros(0, 16), GRAM), config(), "weight has shape [0, 16]: it must be [any, any] and not empty"),
    ((WEIGHT, torch.zeros(0, 0)), config(), "gram has shape [0, 0]: it must be [16, 16]"),
    ((WEIGHT, GRAM, torch.zeros(0, 8, 16)), HALF, "gradients has shape [0, 8, 16]"),
    ((WEIGHT, GRAM[:8, :8]), config(), "gram has shape [8, 8]: it must be [16, 16]"),
    ((WEIGHT[0], GRAM), config(), "weight has shape [16]: it must be [any, any]"),
    ((WEIGHT, GRAM), HALF, "gradients=None: lam=0.5 needs them"),
    ((WEIGHT,), config(), "gram=None: solver='wanda' needs"),
    (([[1.0]], GRAM), config(), "weight is a list: give a torch.Tensor"),
    ((WEIGHT, "gram"), config(), "gram is a str: give a torch.Tensor"),
    ((WEIGHT[:, :15], GRAM[:15, :15]), config(), "d_in=15 is not a multiple of 4"),
    ((WEIGHT, -GRAM), config(solver="sparsegpt"), "gram"),
    ((WEIGHT, GRAM), {"pattern": "2:4"}, "config is a dict: give a MoonshotConfig"),
    ((WEIGHT, GRAM), None, "config is a NoneType: give a MoonshotConfig"),
]


@pytest.mark.parametrize("arguments, settings, words", MATRICES, ids=[words[:40] for *_, words in MATRICES])
def test_matrices(arguments, settings, words):
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        prune_weight(*arguments, config=settings)
    assert one_line(error.value)


PATHS = [
    (config(**OBC), [[0.5]], "sparsities=[0.5]: give a number"),
    (config(**OBC), ["0.5"], "sparsities='0.5': give a number"),
    (config(**OBC), [NAN], "sparsities=nan: give a number"),
    (config(**OBC), [0.5, 0.5], "a value is given twice"),
    (config(**OBC), 0.5, "sparsities=0.5: give a list of numbers"),
    (config(**OBC), [1.5], "sparsity=1.5"),
    ({}, [0.5], "config is a dict"),
    (config(), [0.5], "solver='wanda': it does not support several sparsities"),
]


@pytest.mark.parametrize("settings, sparsities, words", PATHS)
def test_paths_of_one_matrix(settings, sparsities, words):
    with pytest.raises(MoonshotError, match=re.escape(words)):
        weight_path(WEIGHT, GRAM, config=settings, sparsities=sparsities)


NUMBERS = [
    *(("max_memory", value, "give between 1 and 9223372036854775807 bytes") for value in (
        LONG, f"{LONG}TB", int(LONG), 0, "0", 0.0, "0.5", "9223372036854775808", "8388608TiB",
    )),
    *(("max_memory", value, 'give bytes or a size such as "8GiB"') for value in (
        -1, "-5GiB", "1e30", "", [], NAN, float("inf"), True, "inf", "½GiB", "٣GiB", b"1GiB", "8 GiB x", {}, 10**5000,
    )),
    ("num_samples", 2**63, "give a whole number of at most 9223372036854775807"),
    ("num_samples", 10**5000, "num_samples=a int: give a whole number of at most"),
    ("num_samples", -(10**5000), "num_samples=a int: give a whole number of at least 1"),
    ("seed", 2**64, "seed=18446744073709551616: give a whole number of at most"),
    ("batch_size", int(LONG), "batch_size=999"),
    ("sequence_length", 2**80, "sequence_length=1208925819614629174706176: give a whole number of at most"),
    ("offload_dir", "", "offload_dir='': give a path"),
    ("offload_dir", "a\0b", "offload_dir='a\\x00b': give a path"),
]  # fmt: skip


@pytest.mark.parametrize("field, value, words", NUMBERS, ids=range(len(NUMBERS)))
def test_sizes(field, value, words):
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        config(**{field: value})
    assert str(error.value).startswith(f"{field}=") and one_line(error.value) and len(str(error.value)) < 200
