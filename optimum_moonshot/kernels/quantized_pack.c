/* Packing of dense matrices whose weights are on a grid: the inverse of `unpack`. */
#include "parallel.h"
#include "quantized.h"

#define ROUNDING 12582912.f /* 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even */

typedef struct {
    const quantized_matrix *w; /* whose codes and scales are written */
    const void *dense;         /* [d_out, d_in] */
    int failed;                /* set if a group is not on the grid */
} packing;

/* The largest code. */
INLINE int top_code(const quantized_matrix *w) { return (1 << (w->bits - 1)) - 1; }

/* As float_of_f16, without branches, so that compilers vectorize it; infinity becomes NaN, which is on no grid. */
INLINE float finite_of_f16(uint16_t bits) {
    const uint32_t rest = bits & 0x7fff, sign = (uint32_t)(bits & 0x8000) << 16;
    const uint32_t size = bits_of_float(float_of_bits(rest << 13) * 0x1p112f);
    return float_of_bits(sign | (rest < 0x7c00 ? size : 0x7fc00000));
}

INLINE void load_block(const packing *p, int64_t row, int64_t first, float *to) {
    const int dtype = p->w->dtype;
    const int64_t columns = p->w->d_in - first < WORD ? p->w->d_in - first : WORD;
    const char *weights = (const char *)p->dense + (row * p->w->d_in + first) * dtype_bytes(dtype);
    const uint16_t *half = (const uint16_t *)weights;
    if (dtype == BF16)
        for (int64_t i = 0; i < columns; i++) to[i] = float_of_bf16(half[i]);
    else if (dtype == F16)
        for (int64_t i = 0; i < columns; i++) to[i] = finite_of_f16(half[i]);
    else memcpy(to, weights, (size_t)columns * sizeof(float));
    for (int64_t i = columns; i < WORD; i++) to[i] = 0;
}

/* The nearest codes of weights, with the arithmetic of torch. */
INLINE void nearest_codes(const float *weights, float scale, float top, float *codes) {
    for (int i = 0; i < WORD; i++) {
        float code = weights[i] / scale;
        code = code > top ? top : code;
        code = code < -top ? -top : code;
        codes[i] = code + ROUNDING - ROUNDING;
    }
}

/* A value rounded to the dtype, without branches, and without overflow to infinity, which no weight is. */
INLINE float rounded(int dtype, float value) {
    const uint32_t bits = bits_of_float(value), rest = bits & 0x7fffffff;
    if (dtype == F32) return value;
    if (dtype == BF16) return float_of_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    const uint32_t normal = (rest + 0xfff + (rest >> 13 & 1)) & ~0x1fffu;
    const uint32_t denormal = bits_of_float(float_of_bits(rest) + 0.5f - 0.5f);
    return float_of_bits((bits & 0x80000000) | (rest < 0x38800000 ? denormal : normal));
}

INLINE int reproduces_block(int dtype, const float *weights, float scale, float top) {
    float codes[WORD];
    int wrong = 0;
    nearest_codes(weights, scale, top, codes);
    for (int i = 0; i < WORD; i++) wrong |= rounded(dtype, codes[i] * scale) != weights[i];
    return !wrong;
}

/* Whether nearest codes times the scale are the weights from input `first` on; the first block is in `block`. */
static int reproduces(const packing *p, int64_t row, int64_t first, int64_t last, const float *block, float scale) {
    const int dtype = p->w->dtype;
    const float top = (float)top_code(p->w);
    float next[WORD];
    for (;; block = next) {
        const int fits = dtype == BF16  ? reproduces_block(BF16, block, scale, top)
                         : dtype == F16 ? reproduces_block(F16, block, scale, top)
                                        : reproduces_block(F32, block, scale, top);
        if (!fits || (first += WORD) >= last) return fits;
        load_block(p, row, first, next);
    }
}

/* A non-negative value rounded to the dtype and moved by units in the last place; not below 0. */
static float neighbour(int dtype, float value, int ulps) {
    if (dtype == F32) {
        const int64_t bits = (int64_t)bits_of_float(value) + ulps;
        return float_of_bits(bits < 0 ? 0 : (uint32_t)bits);
    }
    const int bits = (dtype == BF16 ? bf16_of_float(value) : f16_of_float(value)) + ulps;
    const uint16_t half = bits < 0 ? 0 : (uint16_t)bits;
    return dtype == BF16 ? float_of_bf16(half) : float_of_f16(half);
}

/* The scale of the weights from input `first` to `last` - 1: 0 without weights, -1 if they are not on the grid. The
 * largest weight is a code times the scale, and so determines the scale for each code, up to one unit. */
static float find_scale(const packing *p, int64_t row, int64_t first, int64_t last) {
    static const int steps[] = {0, 1, -1};
    float block[WORD], largest = 0;
    for (int64_t at = last - 1 - (last - 1 - first) % WORD; at >= first; at -= WORD) { /* ends with the first block */
        load_block(p, row, at, block);
        for (int i = 0; i < WORD; i++) {
            const float size = block[i] < 0 ? -block[i] : block[i];
            largest = size > largest || size != size ? size : largest;
        }
    }
    if (largest == 0) return 0;
    for (int top = top_code(p->w); top > 0; top--)
        for (int step = 0; step < 3; step++) {
            const float scale = neighbour(p->w->dtype, largest / (float)top, steps[step]);
            if (reproduces(p, row, first, last, block, scale)) return scale;
        }
    return -1;
}

/* Write the codes of a block, of the weights that `word` has; returns the end. */
static uint8_t *write_block(uint64_t word, const float *codes, int bits, uint8_t *to) {
    const int zero = 1 << (bits - 1);
    uint32_t pending = 0;
    int count = 0;
    for (; word; word &= word - 1) {
        pending |= (uint32_t)((int)codes[__builtin_ctzll(word)] + zero) << count;
        for (count += bits; count >= 8; count -= 8, pending >>= 8) *to++ = (uint8_t)pending;
    }
    if (count) *to++ = (uint8_t)pending;
    return to;
}

static void store_scale(const quantized_matrix *w, int64_t at, float scale) {
    if (w->dtype == F32) ((float *)w->scale)[at] = scale;
    else ((uint16_t *)w->scale)[at] = w->dtype == BF16 ? bf16_of_float(scale) : f16_of_float(scale);
}

static void pack_rows(const void *context, int64_t first, int64_t last) {
    packing *p = (packing *)context;
    const quantized_matrix *w = p->w;
    const float top = (float)top_code(w);
    for (int64_t row = first; row < last; row++) {
        const uint8_t *meta = meta_row(w, row);
        uint8_t *to = (uint8_t *)code_row(w, row);
        for (int64_t start = 0, number = 0; start < w->d_in; start += w->group, number++) {
            const int64_t end = start + w->group < w->d_in ? start + w->group : w->d_in;
            const float scale = find_scale(p, row, start, end);
            if (scale < 0) {
                __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
                return;
            }
            store_scale(w, row * w->groups + number, scale);
            for (int64_t at = start; at < end; at += WORD) {
                float weights[WORD], codes[WORD];
                load_block(p, row, at, weights);
                nearest_codes(weights, scale ? scale : 1, top, codes);
                to = write_block(block_word(w, meta, at / WORD), codes, w->bits, to);
            }
        }
    }
}

int moonshot_pack_rows(const quantized_matrix *w, const void *dense, int threads) {
    packing p = {w, dense, 0};
    row_task rows = {pack_rows, &p, NULL, w->d_in, dtype_bytes(w->dtype), 0, 0, w->d_out, 0, 0};
    moonshot_run(&rows, threads, 8, 1);
    return -p.failed;
}
