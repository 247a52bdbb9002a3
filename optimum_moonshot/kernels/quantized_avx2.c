/* Quantized matrices on x86-64 with AVX2. */
#include "quantized.h"
#include "tables.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

INLINE void expand_bytes(const int8_t *p, uint8_t bits, int8_t *to) {
    const __m128i places = _mm_loadl_epi64((const __m128i *)moonshot_shuffles.places[bits]);
    _mm_storel_epi64((__m128i *)to, _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)p), places));
}

INLINE void spread_nibbles(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < 2; i++) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 16 * i)));
        const __m256i codes = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
        _mm256_storeu_si256((__m256i *)(to + 32 * i), _mm256_sub_epi8(codes, _mm256_set1_epi8(8)));
    }
}

/* 16 codes are 6 bytes. Each 16-bit lane takes the two bytes that contain its code, and a product moves the code to the
 * upper bits. */
INLINE __m256i spread_six(const uint8_t *p) {
    const __m256i places = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3, /* codes 0 to 7 */
                                            3, 4, 3, 4, 3, 4, 4, 5, 4, 5, 4, 5, 5, 6, 5, 6);
    const __m256i shifts = _mm256_setr_epi16(1 << 13, 1 << 10, 1 << 7, 1 << 12, 1 << 9, 1 << 6, 1 << 11, 1 << 8,
                                             1 << 13, 1 << 10, 1 << 7, 1 << 12, 1 << 9, 1 << 6, 1 << 11, 1 << 8);
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, places), shifts), 13);
}

INLINE void spread_threes(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < 2; i++) {
        const __m256i both = _mm256_packus_epi16(spread_six(p + 12 * i), spread_six(p + 12 * i + 6));
        const __m256i codes = _mm256_permute4x64_epi64(both, 0xd8);
        _mm256_storeu_si256((__m256i *)(to + 32 * i), _mm256_sub_epi8(codes, _mm256_set1_epi8(4)));
    }
}

INLINE void quantize_block(const float *p, float inverse, int8_t *to) {
    for (int i = 0; i < WORD; i += 8) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p + i), _mm256_set1_ps(inverse)));
        const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((__m128i *)(to + i), _mm_packs_epi16(halves, halves));
    }
}

/* The products of magnitudes and inputs with the signs of codes: two of them, at most 128 * 127 each, fit 16 bits. */
INLINE __m256i dot_bytes(__m256i acc, const int8_t *w, const int8_t *x) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)w), inputs = _mm256_loadu_si256((const __m256i *)x);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE void sum_lanes(__m256i a, __m256i b, __m256i c, __m256i d, int32_t *to) {
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128((__m128i *)to, sums);
}

#define EXPAND8(p, bits, to) expand_bytes(p, bits, to)
#define SPREAD4(p, to) spread_nibbles(p, to)
#define SPREAD3(p, to) spread_threes(p, to)
#include "quantized_bytes.h"

#define VECTOR_BYTES 32
#define QUANTIZE(p, inverse, to) quantize_block(p, inverse, to)
#define IVEC __m256i
#define IBYTES 32
#define IZERO() _mm256_setzero_si256()
#define IDOT(acc, a, b) dot_bytes(acc, a, b)
#define ISUM4(a, b, c, d, to) sum_lanes(a, b, c, d, to)
#include "quantized_rows.h"

const quantized_kernel moonshot_quantized_avx2 = QUANTIZED_KERNEL;
#else
const quantized_kernel moonshot_quantized_avx2; /* empty */
#endif
