/* x86-64 with AVX-512 F, BW and VL. Only 32-bit lanes can be expanded, so 16-bit values are widened first. */
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__)
#include "avx512_lanes.h"

INLINE __m512i expand_halves(const uint16_t *p, uint64_t bits) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_maskz_expand_epi32((__mmask16)bits, wide);
}

INLINE __m512 expand_floats(const uint32_t *p, uint64_t bits) {
    __m512 values = _mm512_loadu_ps(p);
    IN_REGISTER(values);
    return _mm512_maskz_expand_ps((__mmask16)bits, values);
}

INLINE __m512 floats_of_bf16(__m512i raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)); }
INLINE __m512 floats_of_f16(__m512i raw) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(raw)); }

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 16
#define RAW __m512i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(raw))
#define STORE_WIDE(p, raw) _mm512_storeu_ps(p, floats_of_bf16(raw))
#define X_OF float_of_bf16
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) floats_of_bf16(raw)
#define FLOATS_AT(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#include "rows.h"

#define NAME(x) f16_##x
#define T uint16_t
#define COLUMNS 16
#define RAW __m512i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(raw))
#define STORE_WIDE(p, raw) _mm512_storeu_ps(p, floats_of_f16(raw))
#define X_OF float_of_f16
#define FLOAT_OF float_of_f16
#define Y_OF f16_of_float
#define PART(raw, k) floats_of_f16(raw)
#define FLOATS_AT(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#include "rows.h"

#define NAME(x) f32_##x
#define T uint32_t
#define COLUMNS 16
#define RAW __m512
#define EXPAND(p, m) expand_floats(p, m)
#define STORE(p, raw) _mm512_storeu_ps((float *)(p), raw)
#define STORE_WIDE(p, raw) _mm512_storeu_ps(p, raw)
#define X_OF float_of_bits
#define FLOAT_OF float_of_bits
#define Y_OF bits_of_float
#define PART(raw, k) (raw)
#define FLOATS_AT(p) _mm512_loadu_ps((const float *)(p))
#include "rows.h"

const kernels moonshot_avx512 = {KERNEL(bf16), KERNEL(f16), KERNEL(f32)};
#else
const kernels moonshot_avx512; /* empty */
#endif
