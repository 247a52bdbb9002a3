"""For kernel-builder, which loads the built kernel; test_kernel_project.py compiles it without kernel-builder."""

import kernels
import pytest
import torch

kernel = kernels.get_kernel("moonshot-kernels", version=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_equals_the_dense_one_at_2_of_4(rows, dtype):
    weight = torch.randint(1, 3, (48, 64), device=DEVICE).to(dtype) * (torch.arange(64, device=DEVICE) % 4 < 2)
    values = weight[weight != 0].view(48, 32)
    meta = torch.full((48, 8), 0b00110011, dtype=torch.uint8, device=DEVICE)
    inputs = torch.randint(-2, 3, (rows, 64), device=DEVICE).to(dtype)
    product = kernel.packed_linear(inputs, values, meta, window=4)
    assert torch.equal(product, inputs @ weight.T)
    arguments = inputs, values, meta, None, None, 4
    torch.library.opcheck(kernel._ops.ops.packed_linear.default, arguments)
