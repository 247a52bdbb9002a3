/* float32 in AVX-512 registers: the definitions for rows.h that all dtypes share. */
#include <immintrin.h>

/* An expansion with a memory operand is microcoded and slow on some CPUs. This prevents the compiler from folding the
 * load into it. */
#define IN_REGISTER(vector) __asm__ volatile("" : "+v"(vector))

/* Transpose 16 rows of 16 lanes of 32 bits. */
INLINE void transpose(__m512i *r) {
    __m512i t[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
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
#define FVECTORS 8
#define TURN(r) transpose((__m512i *)(r))

#define X float
#define LANES 16
#define VEC __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define MULTIPLY(acc, a, b) _mm512_fmadd_ps(a, b, acc)
