/* bfloat16 in 16-bit lanes: what rows.h asks for, with AVX-512 VBMI2 and BF16. */
#include <immintrin.h>

/* A load that the compiler folds into the expansion is microcoded on some processors: it goes to a register first. */
#define IN_REGISTER(vector) __asm__ volatile("" : "+v"(vector))

INLINE __m512i expand_halves(const uint16_t *p, uint64_t bits) {
    __m512i values = _mm512_loadu_si512(p);
    IN_REGISTER(values);
    return _mm512_maskz_expand_epi16((__mmask32)bits, values);
}

#define ACC __m512
#define ZERO() _mm512_setzero_ps()
#define PLUS(a, b) _mm512_add_ps(a, b)
#define SUM(acc) _mm512_reduce_add_ps(acc)
#define ROWS_OF_X 4

#define FLOATS __m512
#define FLANES 16
#define FLOAD(p) _mm512_loadu_ps(p)
#define FSTORE(p, a) _mm512_storeu_ps(p, a)
#define FSET(x) _mm512_set1_ps(x)
#define FADD(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#define FVECTORS 4

#define X uint16_t
#define LANES 32
#define VEC __m512i
#define LOAD(p) _mm512_loadu_si512(p)
#define MULTIPLY(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 32
#define RAW __m512i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm512_storeu_si512(p, raw)
#define STORE_WIDE(p, raw) _mm512_storeu_si512(p, raw)
#define X_OF(bits) (bits)
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) (raw)
#define FLOATS_AT(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
