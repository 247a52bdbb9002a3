/* Quantized matrices on 64-bit ARM with dot products of bytes. */
#include "quantized.h"
#include "tables.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

INLINE void expand_bytes(const int8_t *p, uint8_t bits, int8_t *to) {
    vst1_s8(to, vtbl1_s8(vld1_s8(p), vld1_s8(moonshot_shuffles.places[bits])));
}

INLINE void spread_nibbles(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < 2; i++) {
        const uint8x16_t both = vld1q_u8(p + 16 * i), low = vandq_u8(both, vdupq_n_u8(15)), high = vshrq_n_u8(both, 4);
        const uint8x16_t zero = vdupq_n_u8(8);
        vst1q_s8(to + 32 * i, vreinterpretq_s8_u8(vsubq_u8(vzip1q_u8(low, high), zero)));
        vst1q_s8(to + 32 * i + 16, vreinterpretq_s8_u8(vsubq_u8(vzip2q_u8(low, high), zero)));
    }
}

INLINE int16x4_t round_floats(const float *p, float inverse) {
    return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(p), inverse)));
}

INLINE void quantize_block(const float *p, float inverse, int8_t *to) {
    for (int i = 0; i < WORD; i += 8)
        vst1_s8(to + i, vqmovn_s16(vcombine_s16(round_floats(p + i, inverse), round_floats(p + i + 4, inverse))));
}

#define EXPAND8(p, bits, to) expand_bytes(p, bits, to)
#define SPREAD4(p, to) spread_nibbles(p, to)
#include "quantized_bytes.h"

#define VECTOR_BYTES 16
#define QUANTIZE(p, inverse, to) quantize_block(p, inverse, to)
#define IVEC int32x4_t
#define IBYTES 16
#define IZERO() vdupq_n_s32(0)
#define IDOT(acc, a, b) vdotq_s32(acc, vld1q_s8(a), vld1q_s8(b))
#define ISUM4(a, b, c, d, to) vst1q_s32(to, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)))
#include "quantized_rows.h"

const quantized_kernel moonshot_quantized_neon = QUANTIZED_KERNEL;
#else
const quantized_kernel moonshot_quantized_neon; /* empty */
#endif
