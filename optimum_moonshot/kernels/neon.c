/* 64-bit ARM. There is no expand instruction; byte shuffles from a table expand 8 columns of 16 bits or 4 of 32. */
#include "kernels.h"
#include "tables.h"

#if defined(__aarch64__)
#include <arm_neon.h>

INLINE uint16x8_t expand_halves(const uint16_t *p, uint64_t bits) {
    uint8x16_t places = vld1q_u8(moonshot_shuffles.halves[bits]);
    return vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8((const uint8_t *)p), places));
}

INLINE float32x4_t expand_floats(const uint32_t *p, uint64_t bits) {
    uint8x16_t places = vld1q_u8(moonshot_shuffles.floats[bits]);
    return vreinterpretq_f32_u8(vqtbl1q_u8(vld1q_u8((const uint8_t *)p), places));
}

INLINE float32x4_t floats_of_bf16(uint16x8_t raw, int k) {
    uint16x4_t half = k ? vget_high_u16(raw) : vget_low_u16(raw);
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}

INLINE float32x4_t floats_of_f16(uint16x8_t raw, int k) {
    uint16x4_t half = k ? vget_high_u16(raw) : vget_low_u16(raw);
    return vcvt_f32_f16(vreinterpret_f16_u16(half));
}

#define FLOATS float32x4_t
#define FLANES 4
#define FLOAD(p) vld1q_f32(p)
#define FSTORE(p, a) vst1q_f32(p, a)
#define FSET(x) vdupq_n_f32(x)
#define FADD(acc, a, b) vfmaq_f32(acc, a, b)
#define FVECTORS 8

#define X float
#define LANES 4
#define VEC float32x4_t
#define LOAD(p) vld1q_f32(p)
#define ACC float32x4_t
#define ZERO() vdupq_n_f32(0)
#define PLUS(a, b) vaddq_f32(a, b)
#define SUM(acc) vaddvq_f32(acc)
#define MULTIPLY(acc, a, b) vfmaq_f32(acc, a, b)
#define ROWS_OF_X 4

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 8
#define RAW uint16x8_t
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) vst1q_u16(p, raw)
#define STORE_WIDE(p, raw) (vst1q_f32(p, floats_of_bf16(raw, 0)), vst1q_f32((p) + 4, floats_of_bf16(raw, 1)))
#define X_OF float_of_bf16
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) floats_of_bf16(raw, k)
#define FLOATS_AT(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#include "rows.h"

#define NAME(x) f16_##x
#define T uint16_t
#define COLUMNS 8
#define RAW uint16x8_t
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) vst1q_u16(p, raw)
#define STORE_WIDE(p, raw) (vst1q_f32(p, floats_of_f16(raw, 0)), vst1q_f32((p) + 4, floats_of_f16(raw, 1)))
#define X_OF float_of_f16
#define FLOAT_OF float_of_f16
#define Y_OF f16_of_float
#define PART(raw, k) floats_of_f16(raw, k)
#define FLOATS_AT(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#include "rows.h"

#define NAME(x) f32_##x
#define T uint32_t
#define COLUMNS 4
#define RAW float32x4_t
#define EXPAND(p, m) expand_floats(p, m)
#define STORE(p, raw) vst1q_f32((float *)(p), raw)
#define STORE_WIDE(p, raw) vst1q_f32(p, raw)
#define X_OF float_of_bits
#define FLOAT_OF float_of_bits
#define Y_OF bits_of_float
#define PART(raw, k) (raw)
#define FLOATS_AT(p) vld1q_f32((const float *)(p))
#include "rows.h"

const kernels moonshot_neon = {KERNEL(bf16), KERNEL(f16), KERNEL(f32)};
#else
const kernels moonshot_neon; /* empty */
#endif
