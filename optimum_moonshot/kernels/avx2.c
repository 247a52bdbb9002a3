/* x86-64 with AVX2, FMA and F16C. There is no expand instruction; a table of shuffles for 256 bytes replaces it. */
#include "kernels.h"
#include "tables.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

INLINE __m128i expand_halves(const uint16_t *p, uint64_t bits) {
    __m128i places = _mm_load_si128((const __m128i *)moonshot_shuffles.halves[bits]);
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)p), places);
}

INLINE __m256 expand_floats(const uint32_t *p, uint64_t bits) {
    __m256i places = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)moonshot_shuffles.places[bits]));
    __m256 moved = _mm256_permutevar8x32_ps(_mm256_loadu_ps((const float *)p), places);
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srai_epi32(places, 31)), moved);
}

INLINE __m256 floats_of_bf16(__m128i raw) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

INLINE float sum_floats(__m256 a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#define FLOATS __m256
#define FLANES 8
#define FLOAD(p) _mm256_loadu_ps(p)
#define FSTORE(p, a) _mm256_storeu_ps(p, a)
#define FSET(x) _mm256_set1_ps(x)
#define FADD(acc, a, b) _mm256_fmadd_ps(a, b, acc)
#define FVECTORS 8

#define X float
#define LANES 8
#define VEC __m256
#define LOAD(p) _mm256_loadu_ps(p)
#define ACC __m256
#define ZERO() _mm256_setzero_ps()
#define PLUS(a, b) _mm256_add_ps(a, b)
#define SUM(acc) sum_floats(acc)
#define MULTIPLY(acc, a, b) _mm256_fmadd_ps(a, b, acc)
#define ROWS_OF_X 2

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 8
#define RAW __m128i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm_storeu_si128((__m128i *)(p), raw)
#define STORE_WIDE(p, raw) _mm256_storeu_ps(p, floats_of_bf16(raw))
#define X_OF float_of_bf16
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) floats_of_bf16(raw)
#define FLOATS_AT(p) floats_of_bf16(_mm_loadu_si128((const __m128i *)(p)))
#include "rows.h"

#define NAME(x) f16_##x
#define T uint16_t
#define COLUMNS 8
#define RAW __m128i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm_storeu_si128((__m128i *)(p), raw)
#define STORE_WIDE(p, raw) _mm256_storeu_ps(p, _mm256_cvtph_ps(raw))
#define X_OF float_of_f16
#define FLOAT_OF float_of_f16
#define Y_OF f16_of_float
#define PART(raw, k) _mm256_cvtph_ps(raw)
#define FLOATS_AT(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#include "rows.h"

#define NAME(x) f32_##x
#define T uint32_t
#define COLUMNS 8
#define RAW __m256
#define EXPAND(p, m) expand_floats(p, m)
#define STORE(p, raw) _mm256_storeu_ps((float *)(p), raw)
#define STORE_WIDE(p, raw) _mm256_storeu_ps(p, raw)
#define X_OF float_of_bits
#define FLOAT_OF float_of_bits
#define Y_OF bits_of_float
#define PART(raw, k) (raw)
#define FLOATS_AT(p) _mm256_loadu_ps((const float *)(p))
#include "rows.h"

const kernels moonshot_avx2 = {KERNEL(bf16), KERNEL(f16), KERNEL(f32)};
#else
const kernels moonshot_avx2; /* empty */
#endif
