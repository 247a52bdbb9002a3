/* bfloat16 in 16-bit lanes with AVX-512 VBMI2: definitions for rows.h. */
#include "avx512_lanes.h"

INLINE __m512i expand_halves(const uint16_t *p, uint64_t bits) {
    __m512i values = _mm512_loadu_si512(p);
    IN_REGISTER(values);
    return _mm512_maskz_expand_epi16((__mmask32)bits, values);
}

/* Widening bfloat16 to float is a shift (even columns) or a mask (odd columns) of 32-bit lanes, which is faster than an
 * order-preserving conversion. Inputs are permuted in the same way by PLACE: the even columns of 32, then the odd. */
INLINE __m512 even_floats(__m512i raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)); }
INLINE __m512 odd_floats(__m512i raw) {
    return _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000)));
}

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 32
#define RAW __m512i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm512_storeu_si512(p, raw)
#define STORE_WIDE(p, raw) (_mm512_storeu_ps(p, even_floats(raw)), _mm512_storeu_ps((p) + 16, odd_floats(raw)))
#define X_OF float_of_bf16
#define PLACE(column) ((column) / 32 * 32 + (column) % 2 * 16 + (column) % 32 / 2)
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) ((k) ? odd_floats(raw) : even_floats(raw))
#define FLOATS_AT(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
