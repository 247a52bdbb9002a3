/* Codes of a block and rounding of inputs with AVX-512 VBMI and VBMI2. */
#include "avx512.h"

INLINE __m512i zero_codes(const int bits) { return _mm512_set1_epi8((char)(1 << (bits - 1))); }

INLINE __m512i spread_nibbles(__m256i bytes) {
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    return _mm512_ternarylogic_epi64(wide, _mm512_slli_epi16(wide, 4), _mm512_set1_epi8(15), 0xa8); /* (a | b) & c */
}

INLINE __m512i spread_threes(__m256i bytes) {
    /* Each lane of 64 bits takes the 3 bytes of its 8 codes. */
    const __m512i places = _mm512_setr_epi64(0x020100, 0x050403, 0x080706, 0x0b0a09, 0x0e0d0c, 0x11100f, 0x141312, 0x171615);
    const __m512i shifts = _mm512_set1_epi64(0x15120f0c09060300);
    const __m512i threes = _mm512_permutexvar_epi8(places, _mm512_castsi256_si512(bytes));
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, threes), _mm512_set1_epi8(7));
}

/* The codes of a block as unsigned bytes. */
INLINE __m512i block_codes(const uint8_t *p, const int bits) {
    __m512i codes;
    if (bits == 8) codes = _mm512_loadu_si512(p);
    else if (bits == 4) codes = spread_nibbles(_mm256_loadu_si256((const __m256i *)p));
    else codes = spread_threes(_mm256_loadu_si256((const __m256i *)p));
    IN_REGISTER(codes);
    return codes;
}

INLINE __m512i place_codes(__m512i codes, uint64_t word, const int bits, const int dense) {
    return dense ? codes : _mm512_mask_expand_epi8(zero_codes(bits), (__mmask64)word, codes);
}

INLINE void expand_block(const uint8_t *p, uint64_t word, const int bits, const int dense, int8_t *to) {
    const __m512i codes = place_codes(block_codes(p, bits), word, bits, dense);
    _mm512_storeu_si512(to, _mm512_sub_epi8(codes, zero_codes(bits)));
}

INLINE void quantize_block(const float *p, float inverse, int8_t *to) {
    for (int i = 0; i < WORD; i += 16) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p + i), _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)(to + i), _mm512_cvtepi32_epi8(whole));
    }
}
