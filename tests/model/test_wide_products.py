"""16-bit products of CPUs without instructions for them: values, gradients, memory, and where they are used."""

import pytest
import torch
from llama_runs import weights
from models import make, token_batches
from torch.nn.functional import linear, scaled_dot_product_attention

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.model import isolation as module
from optimum_moonshot.model.isolation import wide_products
from optimum_moonshot.solvers.sparsegpt import SparseGPT

NARROW = (torch.bfloat16, torch.float16)
NARROW_MODEL = torch.nn.Linear(1, 1, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """A CPU without instructions for 16-bit products."""
    monkeypatch.setattr(module, "slow_dtypes", lambda: frozenset(NARROW))


def operands(dtype, shape=(3, 5), bias=True):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, 7, generator=generator), torch.randn(4, 7, generator=generator)]
    tensors += [torch.randn(4, generator=generator)] if bias else []
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(), (6,), (3, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_those_in_float32_rounded(dtype, shape, bias):
    narrow, wide = operands(dtype, shape, bias), [each.detach().float() for each in operands(dtype, shape, bias)]
    with wide_products(NARROW_MODEL):
        output = linear(*narrow)
    expected = linear(*(each.requires_grad_() for each in wide))
    assert output.dtype == dtype and torch.equal(output, expected.to(dtype))
    change = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    output.backward(change)
    expected.backward(change.float())
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad, other.grad.to(dtype), rtol=0.01, atol=0.01)


def attention(query, key, value):
    """Of three heads, two of which share keys and values."""
    query = torch.stack([query, query, query], -3)
    return scaled_dot_product_attention(query, key[..., None, :, :], value[..., None, :, :], is_causal=True, scale=0.3)


# Products of a, b and c, [2, 5, 7] each.
PRODUCTS = {
    "attention": attention,
    "@": lambda a, b, c: (a @ b.mT) @ c,
    "matmul": lambda a, b, c: torch.matmul(a, b.mT).matmul(c[0]),
    "bmm": lambda a, b, c: torch.bmm(a, b.mT).bmm(c),
    "addmm": lambda a, b, c: torch.addmm(a[0], b[0] @ b[1].mT, c[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(a, b @ b.mT, c),
    "einsum": lambda a, b, c: torch.einsum("bij,bkj,bkl->bil", a, b, c),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_batches_and_attention_are_those_in_float32(name, dtype):
    generator, held = torch.Generator().manual_seed(0), []
    narrow = [torch.randn(2, 5, 7, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    wide = [each.detach().float().requires_grad_() for each in narrow]
    change = torch.randn(PRODUCTS[name](*wide).shape, generator=generator).to(dtype)
    with wide_products(NARROW_MODEL):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: held.append(each) or each, lambda each: each):
            output = PRODUCTS[name](*narrow)
        output.backward(change)
    expected = PRODUCTS[name](*wide)
    expected.backward(change.float())
    assert output.grad_fn.name() == "ToCopyBackward0"  # from float32
    assert output.dtype == dtype and all(each.dtype == dtype for each in held)
    torch.testing.assert_close(output, expected.to(dtype), rtol=0.02, atol=0.02)
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=0.05, atol=0.1)


def test_a_backward_pass_holds_nothing_wider():
    held = []
    with wide_products(NARROW_MODEL), torch.autograd.graph.saved_tensors_hooks(held.append, lambda each: each):
        linear(*operands(torch.bfloat16))
    assert held and {each.dtype for each in held} == {torch.bfloat16}


def test_other_products_are_those_of_torch():
    with wide_products(NARROW_MODEL):
        assert not isinstance(linear(*operands(torch.float32)).grad_fn, torch.autograd.function.BackwardCFunction)
        mixed = operands(torch.bfloat16)[0], operands(torch.float32)[1]
        with pytest.raises(RuntimeError, match="dtype"):
            linear(*mixed)
    assert not isinstance(linear(*operands(torch.bfloat16)).grad_fn, torch.autograd.function.BackwardCFunction)


def test_runs_and_evaluation_use_them(monkeypatch):
    calls, apply = [], module._Linear.apply

    def counted(*args):
        calls.append(args)
        return apply(*args)

    monkeypatch.setattr(module._Linear, "apply", counted)
    model = make("llama").bfloat16()
    pruner = MoonshotPruner(model, MoonshotConfig(pattern="2:4", lam=0.5, num_samples=6, sequence_length=12))
    pruner.prune(token_batches(), progress=False)
    assert calls and {tensor.dtype for args in calls for tensor in args if tensor is not None} == {torch.bfloat16}
    assert all(torch.isfinite(weight).all() for weight in weights(model).values())


def test_other_models_and_other_cpus_have_no_mode(monkeypatch):
    with wide_products(torch.nn.Linear(1, 1)):
        assert torch.overrides._len_torch_function_stack() == 0
    with wide_products(NARROW_MODEL):
        assert torch.overrides._len_torch_function_stack() == 1
    monkeypatch.setattr(module, "slow_dtypes", frozenset)
    with wide_products(NARROW_MODEL):
        assert torch.overrides._len_torch_function_stack() == 0


def test_solvers_run_outside_of_the_mode(monkeypatch):
    called, real = [], SparseGPT.solve

    def solve(*args):
        called.append(torch._C._is_torch_function_mode_enabled())
        return real(*args)

    monkeypatch.setattr(SparseGPT, "solve", solve)
    config = MoonshotConfig(pattern="2:4", lam=1, num_samples=6, sequence_length=12)
    MoonshotPruner(make("llama").bfloat16(), config).prune(token_batches(), progress=False)
    assert called and not any(called)
