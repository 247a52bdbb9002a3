// The operator `packed_linear`: x W^T + bias, with W as its nonzero values, row by row, and one bit per weight.
#include <torch/library.h>
#include <torch/torch.h>

#include "registration.h"

#if defined(CPU_KERNEL)
#include <ATen/Parallel.h>

// kernels.h and library.c
extern "C" int moonshot_product(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                                const uint8_t *meta, const int64_t *offsets, const void *x, int64_t rows,
                                const void *bias, void *y, int threads);
extern "C" int moonshot_use(const char *name);

static int dtype_code(at::ScalarType dtype) {
  switch (dtype) {
  case at::kBFloat16: return 0;
  case at::kHalf: return 1;
  case at::kFloat: return 2;
  default: TORCH_CHECK(false, "values have ", dtype, "; bfloat16, float16 and float32 are supported");
  }
}

static void check(bool right, const char *name, const char *shape) {
  TORCH_CHECK(right, name, " must be ", shape, ", contiguous, in host memory");
}

static at::Tensor packed_linear(const at::Tensor &inputs, const at::Tensor &values, const at::Tensor &meta,
                                const std::optional<at::Tensor> &offsets, const std::optional<at::Tensor> &bias,
                                int64_t) {
  static const int chosen = moonshot_use(nullptr);
  TORCH_CHECK(chosen == 0, "no instruction set is supported");
  const auto ready = [](const at::Tensor &tensor, at::ScalarType dtype) {
    return tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype;
  };
  const int dtype = dtype_code(values.scalar_type());
  TORCH_CHECK(inputs.dim() > 0, "inputs must be [..., d_in]");
  const int64_t d_in = inputs.size(-1), d_out = meta.size(0);
  check(ready(values, values.scalar_type()), "values", "[d_out, values of a row], or [values] with offsets");
  check(inputs.is_cpu() && inputs.scalar_type() == values.scalar_type(), "inputs", "[..., d_in] in the values' dtype");
  check(ready(meta, at::kByte) && meta.dim() == 2 && meta.size(1) == (d_in + 7) / 8, "meta", "uint8 [d_out, d_in / 8]");
  check(offsets ? ready(*offsets, at::kLong) && offsets->numel() == d_out + 1 : values.dim() == 2, "offsets",
        "int64 [d_out + 1] for flat values");
  check(!bias || (ready(*bias, values.scalar_type()) && bias->numel() == d_out), "bias", "[d_out] in the values' dtype");
  auto shape = inputs.sizes().vec();
  shape.back() = d_out;
  const at::Tensor x = inputs.contiguous();
  at::Tensor y = at::empty(shape, x.options());
  if (!y.numel()) return y;
  const int failed = moonshot_product(dtype, d_out, d_in, values.const_data_ptr(), values.numel(),
                                      meta.const_data_ptr<uint8_t>(),
                                      offsets ? offsets->const_data_ptr<int64_t>() : nullptr, x.const_data_ptr(),
                                      y.numel() / d_out, bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(),
                                      at::get_num_threads());
  TORCH_CHECK(!failed, "no memory for a copy of the inputs");
  return y;
}
#endif

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("packed_linear(Tensor inputs, Tensor values, Tensor meta, Tensor? offsets, Tensor? bias, int window) -> Tensor");
#if defined(CPU_KERNEL)
  ops.impl("packed_linear", torch::kCPU, &packed_linear);
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
