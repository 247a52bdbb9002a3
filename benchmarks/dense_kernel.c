/* One row of inputs times a dense matrix, as fast as memory gives it: what a packed product is compared with. */
#include <immintrin.h>
#include <stdint.h>

/* Bytes ahead that are fetched, as the packed product does: near, and far, into the second-level cache. */
#define NEAR 1024
#define FAR 8192

static float of_bf16(uint16_t bits) {
    union {
        uint32_t bits;
        float value;
    } one = {(uint32_t)bits << 16};
    return one.value;
}

/* y [d_out] = W [d_out, d_in] x, bfloat16 with float32 sums; d_in is a multiple of 128. */
void dense_bf16(int64_t d_out, int64_t d_in, const uint16_t *w, const uint16_t *x, float *y) {
    for (int64_t row = 0; row < d_out; row++, w += d_in) {
#if defined(__AVX512BF16__)
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t i = 0; i < d_in; i += 128)
            for (int k = 0; k < 4; k++) {
                _mm_prefetch((const char *)(w + i + 32 * k) + NEAR, _MM_HINT_T0);
                _mm_prefetch((const char *)(w + i + 32 * k) + FAR, _MM_HINT_T1);
                sums[k] = _mm512_dpbf16_ps(sums[k], (__m512bh)_mm512_loadu_si512(w + i + 32 * k),
                                           (__m512bh)_mm512_loadu_si512(x + i + 32 * k));
            }
        y[row] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
#else
        float sum = 0;
        for (int64_t i = 0; i < d_in; i++) sum += of_bf16(w[i]) * of_bf16(x[i]);
        y[row] = sum;
#endif
    }
}

/* The same in float32. */
void dense_f32(int64_t d_out, int64_t d_in, const float *w, const float *x, float *y) {
    for (int64_t row = 0; row < d_out; row++, w += d_in) {
        float sums[64] = {0}, sum = 0;
        for (int64_t i = 0; i < d_in; i += 64) {
            for (int line = 0; line < 256; line += 64) {
                _mm_prefetch((const char *)(w + i) + NEAR + line, _MM_HINT_T0);
                _mm_prefetch((const char *)(w + i) + FAR + line, _MM_HINT_T1);
            }
            for (int k = 0; k < 64; k++) sums[k] += w[i + k] * x[i + k];
        }
        for (int k = 0; k < 64; k++) sum += sums[k];
        y[row] = sum;
    }
}
