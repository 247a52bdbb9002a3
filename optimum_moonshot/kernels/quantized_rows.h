/* Unpacking, rounding of inputs, and products with a quantized matrix: a template, included once for each instruction
 * set. The including file defines:
 *
 *   VECTOR_BYTES                    of a vector of floats
 *   QUANTIZE(p, inverse, to)        round 64 floats times inverse to integers, ties to even; optional
 *   EXPAND(p, word, bits, dense, to) store 64 signed codes, 0 where a weight was pruned; reads 64 bytes at p
 *   EXPAND_BLOCKS                   in its place, a function for several blocks, as `expand_blocks` of this file
 *   MULTIPLY                        the product with rounded inputs; else, for the one of this file:
 *   IVEC, IBYTES, IZERO(), IDOT(acc, w, x), ISUM4(a, b, c, d, to)
 *                                   a vector of int32 sums of products of IBYTES bytes; 4 sums of its lanes
 *   START(x, count, zero, start)    set the lanes of `start` for inputs that are not in tiles; optional
 *   TILE, TILE_FROM                 rows of inputs in a tile, and the least rows of inputs that are stored in tiles
 */
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef TILE
#define TILE 1
#define TILE_FROM INT64_MAX
#endif
#ifndef START
#define START(x, count, zero, start) (void)0 /* unused */
#endif

typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
#define FLANES (VECTOR_BYTES / 4)

INLINE float total(floats sums) {
    float sum = 0;
    for (int width = FLANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sum + sums[0];
}

static void floats_of(int dtype, const void *from, int64_t count, float *to) {
    int64_t i = 0;
    if (dtype == F32) {
        memcpy(to, from, (size_t)count * sizeof *to);
    } else if (dtype == BF16) {
        for (; i < count; i++) to[i] = float_of_bf16(((const uint16_t *)from)[i]);
    } else {
        const uint16_t *halves = from;
#if defined(__F16C__)
        for (; i + 8 <= count; i += 8) {
            const __m128i eight = _mm_loadu_si128((const __m128i *)(halves + i));
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
        }
#endif
        for (; i < count; i++) to[i] = float_of_f16(halves[i]);
    }
}

static void store_floats(int dtype, const float *from, int64_t count, void *to) {
    int64_t i = 0;
    if (dtype == F32) {
        memcpy(to, from, (size_t)count * sizeof *from);
    } else if (dtype == BF16) {
        for (; i < count; i++) ((uint16_t *)to)[i] = bf16_of_float(from[i]);
    } else {
        uint16_t *halves = to;
#if defined(__F16C__)
        for (; i + 8 <= count; i += 8) {
            const __m256 eight = _mm256_loadu_ps(from + i);
            _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
        }
#endif
        for (; i < count; i++) halves[i] = f16_of_float(from[i]);
    }
}

#ifndef QUANTIZE
/* The product is rounded to float before it is rounded to an integer. Compilers fuse a multiplication and an addition
 * where the CPU can, but not across the conversion to double. */
INLINE void quantize_block(const float *p, float inverse, int8_t *to) {
    for (int i = 0; i < WORD; i++) {
        const double whole = (double)(p[i] * inverse) + 0x1.8p52;
        uint64_t bits;
        memcpy(&bits, &whole, 8);
        to[i] = (int8_t)bits;
    }
}
#define QUANTIZE(p, inverse, to) quantize_block(p, inverse, to)
#endif

/* Rows of inputs are stored in tiles of equal size, as registers allow. Returns the size of the first. */
INLINE int64_t tile_rows(int64_t rows) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    return (rows + tiles - 1) / tiles;
}

#define LEAST_INPUT 0x1p-96f /* its inverse times 127 is finite */

/* The largest magnitude of a row's group; infinity if one is not finite. */
INLINE float largest(const float *p, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t magnitude = bits_of_float(p[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    return float_of_bits(most < 0x7f800000 ? most : 0x7f800000);
}

/* Round a row to x; returns 0 if it cannot be rounded. */
static int quantize_row(const quantized_matrix *w, const float *row, int8_t *x, float *scale, int32_t *start,
                        int tiles) {
    const int32_t zero = 1 << (w->bits - 1);
    for (int64_t group = 0; group < w->groups; group++) {
        const int64_t begin = group * w->group, end = begin + w->group < w->d_in ? begin + w->group : w->d_in;
        const float most = largest(row + begin, end - begin);
        if (most > 0x1.fffffep127f || (most > 0 && most < LEAST_INPUT)) return 0;
        const float inverse = most > 0 ? 127 / most : 0;
        for (int64_t i = begin; i < end; i += WORD) QUANTIZE(row + i, inverse, x + i);
        for (int64_t span = group * w->per_group; span < w->spans && span_group(w, span) == group; span++) {
            const int64_t first = span_start(w, span), last = span_end(w, span);
            scale[span] = most / 127;
            if (!tiles) {
                START(x + first, last - first, zero, start + span * START_LANES);
                continue;
            }
            start[span] = 0;
            for (int64_t i = first; i < last; i++) start[span] -= zero * x[i];
        }
    }
    return 1;
}

/* From TILE_FROM rows on, 4 inputs of all rows of a tile are stored together. */
static int64_t quantize(const quantized_matrix *w, const void *x, quantized_inputs *to, float *row) {
    const int64_t stride = quantized_stride(w), bytes = dtype_bytes(w->dtype) * w->d_in;
    int8_t *rounded = (int8_t *)(row + stride);
    int64_t special = 0, width = 1, place = 0;
    memset(row + w->d_in, 0, (size_t)(stride - w->d_in) * sizeof *row);
    for (int64_t i = 0; i < to->rows; i++, place++) {
        const int tiles = to->rows >= TILE_FROM;
        const int64_t from = i * w->spans, lanes = tiles ? 1 : START_LANES;
        int32_t *start = to->start + from * lanes;
        int8_t *here = tiles ? rounded : to->x + i * stride;
        if (tiles && (i == 0 || place == width)) place = 0, width = tile_rows(to->rows - i);
        floats_of(w->dtype, (const char *)x + i * bytes, w->d_in, row);
        memset(here + stride - WORD, 0, WORD);
        if (!quantize_row(w, row, here, to->scale + from, start, tiles)) {
            memset(here, 0, (size_t)stride);
            memset(to->scale + from, 0, (size_t)w->spans * sizeof *to->scale);
            memset(start, 0, (size_t)(w->spans * lanes) * sizeof *start);
            to->places[special++] = i;
        }
        int32_t *tile = (int32_t *)(to->x + (i - place) * stride) + place;
        for (int64_t k = 0; tiles && k < stride / 4; k++) memcpy(tile + k * width, here + 4 * k, 4);
    }
    return special;
}

static void widen(const quantized_matrix *w, const void *x, quantized_inputs *to) {
    const int64_t stride = quantized_stride(w), bytes = dtype_bytes(w->dtype) * w->d_in;
    for (int64_t i = 0; i < to->rows; i++) {
        floats_of(w->dtype, (const char *)x + to->places[i] * bytes, w->d_in, to->wide + i * stride);
        memset(to->wide + i * stride + w->d_in, 0, (size_t)(stride - w->d_in) * sizeof(float));
    }
}

/* Signed codes of blocks first to last - 1, at most SPAN inputs, of a row; returns the address of the next code. */
#ifndef EXPAND_BLOCKS
INLINE const uint8_t *expand_blocks(const quantized_matrix *w, const uint8_t *p, const uint8_t *meta, int64_t first,
                                    int64_t last, int8_t *to, const int bits) {
    const uint8_t *end = w->codes + w->stored;
    uint8_t copy[WORD];
    for (int64_t block = first; block < last; block++, to += WORD) {
        const uint64_t word = block_word(w, meta, block);
        EXPAND(readable(p, end, copy), word, bits, meta == NULL, to);
        p += code_bytes(word, bits);
    }
    return p;
}
#endif

static const uint8_t *expand(const quantized_matrix *w, const uint8_t *p, const uint8_t *meta, int64_t first,
                             int64_t last, int8_t *to) {
#define EXPAND_AS(bits)                                                                                                \
    return meta ? expand_blocks(w, p, meta, first, last, to, bits) : expand_blocks(w, p, NULL, first, last, to, bits)
    if (w->bits == 8) EXPAND_AS(8);
    if (w->bits == 4) EXPAND_AS(4);
    EXPAND_AS(3);
#undef EXPAND_AS
}

#define PIECE 1024 /* inputs that are unpacked at a time, at most a span */

/* Unpack inputs first to last - 1, at most PIECE from a multiple of 64, of a row; returns the next code. */
static const uint8_t *dense_piece(const quantized_matrix *w, int64_t row, const uint8_t *p, int64_t first, int64_t last,
                                  void *to) {
    int8_t codes[PIECE];
    float values[PIECE];
    p = expand(w, p, meta_row(w, row), first / WORD, (last + WORD - 1) / WORD, codes);
    for (int64_t i = first, end; i < last; i = end) {
        const float scale = float_at(w->dtype, w->scale, row * w->groups + i / w->group);
        end = (i / w->group + 1) * w->group < last ? (i / w->group + 1) * w->group : last;
        for (int64_t j = i; j < end; j++) values[j - first] = (float)codes[j - first] * scale;
    }
    store_floats(w->dtype, values, last - first, to);
    return p;
}

static void unpack(const quantized_matrix *w, int64_t first, int64_t last, void *dense) {
    char *to = dense;
    for (int64_t row = first; row < last; row++) {
        const uint8_t *p = code_row(w, row);
        for (int64_t i = 0, end; i < w->d_in; i = end) {
            end = i + PIECE < w->d_in ? i + PIECE : w->d_in;
            p = dense_piece(w, row, p, i, end, to);
            to += (end - i) * dtype_bytes(w->dtype);
        }
    }
}

/* The outputs of `count` rows of W, `count` sums for each row of inputs at `stride`. */
static void finish(const quantized_matrix *w, const quantized_job *job, int64_t row, int64_t count, float *sums,
                   int64_t stride, int wide) {
    const int bytes = dtype_bytes(w->dtype);
    for (int64_t i = 0; i < job->inputs->rows; i++, sums += stride) {
        const int64_t place = wide ? job->inputs->places[i] : i;
        for (int64_t k = 0; job->bias && k < count; k++) sums[k] += float_at(w->dtype, job->bias, row + k);
        store_floats(w->dtype, sums, count, (char *)job->y + (place * w->d_out + row) * bytes);
    }
}

/* Sums of 4 rows of W and `rows` of inputs; floats beyond `count` are zeros. */
INLINE void dot_wide(const float *weights, const float *x, int64_t stride, int64_t count, float *sums, const int rows) {
    floats acc[4][2] = {{{0}}};
    for (int64_t i = 0; i < count; i += FLANES) {
        UNROLL for (int k = 0; k < 4; k++) {
            const floats weight = *(const floats *)(weights + k * PIECE + i);
            UNROLL for (int r = 0; r < rows; r++) acc[k][r] += weight * *(const floats *)(x + r * stride + i);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < 4; k++) sums[4 * r + k] += total(acc[k][r]);
}

static void multiply_wide(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last) {
    const int64_t stride = quantized_stride(w), rows = job->inputs->rows;
    float weights[4 * PIECE], sums[4 * AT_ONCE];
    uint32_t piece[PIECE];
    for (int64_t row = first; row < last; row += 4) {
        const int64_t count = last - row < 4 ? last - row : 4;
        const uint8_t *p[4];
        for (int k = 0; k < count; k++) p[k] = code_row(w, row + k);
        memset(sums, 0, sizeof sums);
        memset(weights, 0, sizeof weights);
        for (int64_t i = 0; i < w->d_in; i += PIECE) {
            const int64_t end = i + PIECE < w->d_in ? i + PIECE : w->d_in, padded = (end - i + WORD - 1) / WORD * WORD;
            for (int k = 0; k < count; k++) {
                p[k] = dense_piece(w, row + k, p[k], i, end, piece);
                floats_of(w->dtype, piece, end - i, weights + k * PIECE);
                memset(weights + k * PIECE + end - i, 0, (size_t)(padded - end + i) * sizeof *weights);
            }
            const float *x = job->inputs->wide + i;
            int64_t r = 0;
            for (; r + 2 <= rows; r += 2) dot_wide(weights, x + r * stride, stride, padded, sums + 4 * r, 2);
            if (r < rows) dot_wide(weights, x + r * stride, stride, padded, sums + 4 * r, 1);
        }
        finish(w, job, row, count, sums, 4, 1);
    }
}

#ifndef MULTIPLY
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t four_integers __attribute__((vector_size(16), aligned(4), may_alias));

/* Add the products of a span of 4 rows of W and `rows` of inputs to their sums. */
INLINE void dot(const int8_t *codes, const int8_t *x, int64_t stride, int64_t count, const float *scales,
                const float *x_scale, int64_t spans, float *sums, const int rows) {
    IVEC acc[4][2];
    UNROLL for (int k = 0; k < 4; k++)
        UNROLL for (int r = 0; r < rows; r++) acc[k][r] = IZERO();
    for (int64_t i = 0; i < count; i += IBYTES)
        UNROLL for (int k = 0; k < 4; k++)
            UNROLL for (int r = 0; r < rows; r++) acc[k][r] = IDOT(acc[k][r], codes + k * APART + i, x + r * stride + i);
    UNROLL for (int r = 0; r < rows; r++) {
        int32_t dots[4];
        ISUM4(acc[0][r], acc[1][r], acc[2][r], acc[3][r], dots);
        const four exact = __builtin_convertvector(*(const four_integers *)dots, four);
        *(four *)(sums + 4 * r) += exact * (*(const four *)scales * x_scale[r * spans]);
    }
}

/* Inputs are unpacked PIECE at a time, or a span if it is longer, because a call for a short group takes longer than its
 * products. */
static void multiply(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last) {
    const quantized_inputs *inputs = job->inputs;
    const int64_t stride = quantized_stride(w), rows = inputs->rows, at_once = strip_end(w, 0, PIECE);
    int8_t codes[4 * APART] __attribute__((aligned(64)));
    float sums[4 * AT_ONCE];
    if (last - first < 4) memset(codes, 0, sizeof codes); /* else the last rows are followed by earlier ones */
    for (int64_t row = first; row < last; row += 4) {
        const int64_t count = last - row < 4 ? last - row : 4;
        const uint8_t *p[4];
        float scales[4] = {0};
        for (int k = 0; k < count; k++) p[k] = code_row(w, row + k);
        memset(sums, 0, sizeof sums);
        for (int64_t span = 0, next; span < w->spans; span = next) {
            next = span + at_once < w->spans ? span + at_once : w->spans;
            const int64_t start = span_start(w, span), blocks = (span_end(w, next - 1) + WORD - 1) / WORD;
            for (int k = 0; k < count; k++)
                p[k] = expand(w, p[k], meta_row(w, row + k), start / WORD, blocks, codes + k * APART);
            for (; span < next; span++) {
                const int64_t from = span_start(w, span), length = (span_end(w, span) - from + WORD - 1) / WORD * WORD;
                for (int k = 0; k < count; k++)
                    scales[k] = float_at(w->dtype, w->scale, (row + k) * w->groups + span_group(w, span));
                const int8_t *x = inputs->x + from, *here = codes + from - start;
                const float *x_scale = inputs->scale + span;
                int64_t r = 0;
                for (; r + 2 <= rows; r += 2)
                    dot(here, x + r * stride, stride, length, scales, x_scale + r * w->spans, w->spans, sums + 4 * r, 2);
                if (r < rows)
                    dot(here, x + r * stride, stride, length, scales, x_scale + r * w->spans, w->spans, sums + 4 * r, 1);
            }
        }
        finish(w, job, row, count, sums, 4, 0);
    }
}
#define MULTIPLY multiply
#endif

#define QUANTIZED_KERNEL {unpack, MULTIPLY, multiply_wide, quantize, widen}
