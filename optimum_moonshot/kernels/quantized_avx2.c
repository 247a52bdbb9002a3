/* Quantized matrices on x86-64 with AVX2. */
#include "quantized.h"
#include "tables.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

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

INLINE void spread_bytes(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < WORD; i += 32) {
        const __m256i codes = _mm256_loadu_si256((const __m256i *)(p + i));
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_xor_si256(codes, _mm256_set1_epi8(-128)));
    }
}

INLINE void spread_block(const uint8_t *p, const int bits, int8_t *to) {
    if (bits == 8) spread_bytes(p, to);
    else if (bits == 4) spread_nibbles(p, to);
    else spread_threes(p, to);
}

/* Signed codes of `count` columns, a multiple of 32: the next code of `codes` where `keep` has a bit, else 0. */
INLINE void place_codes(const int8_t *codes, const uint8_t *keep, int64_t count, int8_t *to) {
    for (int64_t i = 0; i < count; i += 32) {
        __m128i eights[4];
        UNROLL for (int k = 0; k < 4; k++) {
            const uint8_t bits = keep[i / 8 + k];
            const __m128i places = _mm_loadl_epi64((const __m128i *)moonshot_shuffles.places[bits]);
            eights[k] = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)codes), places);
            codes += __builtin_popcount(bits);
        }
        const __m128i low = _mm_unpacklo_epi64(eights[0], eights[1]), high = _mm_unpacklo_epi64(eights[2], eights[3]);
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_set_m128i(high, low));
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

/* Codes of all blocks are spread before the first is placed: a load that spans two recent stores waits for both. */
INLINE const uint8_t *expand_blocks(const quantized_matrix *w, const uint8_t *p, const uint8_t *meta, int64_t first,
                                    int64_t last, int8_t *to, const int bits) {
    const uint8_t *end = w->codes + w->stored;
    int8_t codes[SPAN + WORD], *next = meta ? codes : to;
    uint64_t keep[SPAN / WORD];
    uint8_t copy[WORD];
    for (int64_t block = first; block < last; block++) {
        const uint64_t word = block_word(w, meta, block);
        spread_block(readable(p, end, copy), bits, next);
        p += code_bytes(word, bits);
        keep[block - first] = word;
        next += meta ? __builtin_popcountll(word) : WORD;
    }
    if (meta) place_codes(codes, (const uint8_t *)keep, (last - first) * WORD, to);
    return p;
}

#define EXPAND_BLOCKS expand_blocks
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
