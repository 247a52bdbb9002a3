/* Quantized matrices on x86-64 with AVX-512 VBMI, VBMI2 and VNNI. Codes stay unsigned, and pruned weights get the code
 * of zero: `start` of the inputs subtracts it. */
#include "quantized.h"

#if defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512VNNI__) && defined(__F16C__)
#include "avx512_codes.h"

/* sums + codes * inputs, 4 bytes to a lane. For the intrinsic, some versions of GCC copy the sums twice, and spill them. */
INLINE __m512i add_products(__m512i sums, __m512i codes, __m512i inputs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(inputs));
    return sums;
}

/* Minus the products of the zero code in each lane: then each lane, not only their sum, has the exact sum over c. */
INLINE void start_lanes(const int8_t *x, int64_t count, int32_t zero, int32_t *start) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += WORD)
        sums = add_products(sums, _mm512_set1_epi8((char)zero), _mm512_loadu_si512(x + i));
    _mm512_storeu_si512(start, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
}

/* Codes are prefetched twice: far ahead, which hides the miss of the TLB, and near. Rows are too short for the CPU's own
 * prefetching, which stops at the end of a page. */
INLINE void fetch(const uint8_t *p, const uint8_t *meta) {
    __builtin_prefetch(p + NEAR / 2);
    __builtin_prefetch(p + FAR, 0, 2);
    if (meta) __builtin_prefetch(meta + FAR / 2, 0, 2);
}

static void multiply_codes(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last);

#define VECTOR_BYTES 64
#define QUANTIZE(p, inverse, to) quantize_block(p, inverse, to)
#define EXPAND(p, word, bits, dense, to) expand_block(p, word, bits, dense, to)
#define MULTIPLY multiply_codes
#define START(x, count, zero, start) start_lanes(x, count, zero, start)
#define TILE 12
#define TILE_FROM 4
#include "quantized_rows.h"

/* Few rows of inputs: 4 rows of W at a time, whose codes are multiplied in registers. */

#define TOGETHER 64 /* outputs that are stored together */
#define AHEAD 64 /* spans whose scales are converted at a time */

typedef struct {
    const uint8_t *p[4], *meta[4];
    float scales[4][TILE_FROM][AHEAD]; /* of W times those of the inputs */
} four_rows;

/* Up to 16 numbers as floats, 0 beyond `count`. */
INLINE __m512 few_floats(int dtype, const void *p, int64_t i, int64_t count) {
    const __mmask16 mask = count < 16 ? (__mmask16)((1 << count) - 1) : 0xffff;
    if (dtype == F32) return _mm512_maskz_loadu_ps(mask, (const float *)p + i);
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)p + i);
    if (dtype == F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE void few_scales(const quantized_matrix *w, const quantized_inputs *inputs, int64_t row, int64_t last,
                       int64_t first, int64_t count, four_rows *four, const int rows) {
    for (int64_t k = 0; k < 4; k++) {
        const int64_t from = (row + k < last ? row + k : last - 1) * w->groups;
        for (int64_t i = 0; i < count; i += 16) {
            const int64_t span = first + i, left = count - i;
            __m512 scales;
            if (w->per_group == 1) {
                scales = few_floats(w->dtype, w->scale, from + span, left);
            } else {
                float each[16] = {0};
                for (int64_t j = 0; j < left && j < 16; j++) each[j] = float_at(w->dtype, w->scale, from + span_group(w, span + j));
                scales = _mm512_loadu_ps(each);
            }
            for (int r = 0; r < rows; r++)
                _mm512_storeu_ps(four->scales[k][r] + i, _mm512_mul_ps(scales, few_floats(F32, inputs->scale + r * w->spans, span, left)));
        }
    }
}

/* Add the products of `count` spans to the sums. */
INLINE void few_spans(const quantized_matrix *w, const quantized_inputs *inputs, int64_t first, int64_t count,
                      four_rows *four, __m512 sums[4][TILE_FROM], const int bits, const int dense, const int rows,
                      const int careful) {
    const int64_t stride = quantized_stride(w);
    const uint8_t *end = w->codes + w->stored;
    for (int64_t i = 0; i < count; i++) {
        const int64_t span = first + i, last = (span_end(w, span) + WORD - 1) / WORD;
        __m512i acc[4][TILE_FROM];
        UNROLL for (int r = 0; r < rows; r++) {
            const __m512i start = _mm512_loadu_si512(inputs->start + (r * w->spans + span) * START_LANES);
            UNROLL for (int k = 0; k < 4; k++) acc[k][r] = start;
        }
        for (int64_t block = span_start(w, span) / WORD; block < last; block++) {
            __m512i x[TILE_FROM];
            UNROLL for (int r = 0; r < rows; r++) x[r] = _mm512_loadu_si512(inputs->x + r * stride + block * WORD);
            UNROLL for (int k = 0; k < 4; k++) {
                uint8_t copy[WORD];
                const uint8_t *p = careful ? readable(four->p[k], end, copy) : four->p[k];
                uint64_t word = ~0ull;
                if (careful) word = block_word(w, dense ? NULL : four->meta[k], block);
                else if (!dense) memcpy(&word, four->meta[k] + 8 * block, 8);
                if (!careful) fetch(p, dense ? NULL : four->meta[k] + 8 * block);
                const __m512i codes = place_codes(block_codes(p, bits), word, bits, dense);
                four->p[k] += dense && !careful ? 8 * bits : code_bytes(word, bits);
                UNROLL for (int r = 0; r < rows; r++) acc[k][r] = add_products(acc[k][r], codes, x[r]);
            }
        }
        UNROLL for (int k = 0; k < 4; k++)
            UNROLL for (int r = 0; r < rows; r++)
                sums[k][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[k][r]), _mm512_set1_ps(four->scales[k][r][i]), sums[k][r]);
    }
}

INLINE void few(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last, const int bits,
                const int dense, const int rows) {
    const uint8_t *end = w->codes + w->stored;
    float outputs[TILE_FROM * TOGETHER];
    four_rows four;
    for (int64_t row = first; row < last; row += 4) {
        const int64_t left = last - row < 4 ? last - row : 4;
        __m512 sums[4][TILE_FROM];
        UNROLL for (int k = 0; k < 4; k++) {
            four.p[k] = code_row(w, k < left ? row + k : last - 1);
            four.meta[k] = meta_row(w, k < left ? row + k : last - 1);
            UNROLL for (int r = 0; r < rows; r++) sums[k][r] = _mm512_setzero_ps();
        }
        for (int64_t span = 0, count; span < w->spans; span += count) {
            count = w->spans - span < AHEAD ? w->spans - span : AHEAD;
            const int64_t stop = span_end(w, span + count - 1), most = (stop - span_start(w, span)) / 8 * bits + WORD;
            int slack = stop % WORD == 0;
            for (int k = 0; k < 4; k++) slack &= end - four.p[k] >= most;
            few_scales(w, job->inputs, row, last, span, count, &four, rows);
            if (slack) few_spans(w, job->inputs, span, count, &four, sums, bits, dense, rows, 0);
            else few_spans(w, job->inputs, span, count, &four, sums, bits, dense, rows, 1);
        }
        const int64_t place = (row - first) % TOGETHER, count = place + left;
        UNROLL for (int k = 0; k < 4; k++)
            UNROLL for (int r = 0; r < rows; r++) outputs[TOGETHER * r + place + k] = _mm512_reduce_add_ps(sums[k][r]);
        if (count == TOGETHER || row + left == last) finish(w, job, row - place, count, outputs, TOGETHER, 0);
    }
}

/* More rows: 32 rows of W are expanded to a buffer, where 4 codes of each are next to those of the other rows. Each
 * product with 4 inputs then yields sums for 16 rows, and W is expanded once for all inputs. */

#define OUTPUTS 32
#define STRIP SPAN     /* most inputs that are expanded at a time: the buffer fits the second-level cache */
#define SHORT_STRIP 512 /* for few rows of inputs, it fits the first-level cache */

/* Expand blocks first to last - 1 of 16 rows, to every other vector of `to`. */
INLINE void expand_16(const quantized_matrix *w, const uint8_t **p, const uint8_t *const *meta, int64_t first,
                      int64_t last, __m512i *to, const int bits, const int dense) {
    const uint8_t *end = w->codes + w->stored;
    for (int64_t block = first; block < last; block++, to += 2 * 16) {
        __m512i rows[16];
        UNROLL for (int k = 0; k < 16; k++) {
            uint8_t copy[WORD];
            const uint64_t word = block_word(w, dense ? NULL : meta[k], block);
            rows[k] = place_codes(block_codes(readable(p[k], end, copy), bits), word, bits, dense);
            p[k] += code_bytes(word, bits);
            fetch(p[k], dense ? NULL : meta[k] + 8 * block);
        }
        transpose(rows);
        UNROLL for (int k = 0; k < 16; k++) _mm512_store_si512(to + 2 * k, rows[k]);
    }
}

static void expand_half(const quantized_matrix *w, const uint8_t **p, const uint8_t *const *meta, int64_t first,
                        int64_t last, __m512i *to) {
    if (w->bits == 8) {
        if (w->meta) expand_16(w, p, meta, first, last, to, 8, 0);
        else expand_16(w, p, meta, first, last, to, 8, 1);
    } else if (w->bits == 4) {
        if (w->meta) expand_16(w, p, meta, first, last, to, 4, 0);
        else expand_16(w, p, meta, first, last, to, 4, 1);
    } else {
        if (w->meta) expand_16(w, p, meta, first, last, to, 3, 0);
        else expand_16(w, p, meta, first, last, to, 3, 1);
    }
}

/* Add the products of OUTPUTS rows of W and a tile of inputs, for spans first to last - 1. */
INLINE void tile_spans(const quantized_matrix *w, const __m512i *panel, const float *scales, const quantized_inputs *inputs,
                       int64_t x_row, int64_t first, int64_t last, float *sums, const int rows) {
    const int32_t *x = (const int32_t *)(inputs->x + x_row * quantized_stride(w)) + span_start(w, first) / 4 * rows;
    const float *x_scale = inputs->scale + x_row * w->spans;
    const int32_t *start = inputs->start + x_row * w->spans;
    for (int64_t span = first; span < last; span++, scales += OUTPUTS) {
        __m512i acc[TILE][2];
        UNROLL for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_set1_epi32(start[r * w->spans + span]);
        const int64_t steps = (span_end(w, span) - span_start(w, span) + WORD - 1) / WORD * 16;
        for (int64_t step = 0; step < steps; step++, x += rows, panel += 2) {
            const __m512i low = _mm512_load_si512(panel), high = _mm512_load_si512(panel + 1);
            UNROLL for (int r = 0; r < rows; r++) {
                const __m512i four = _mm512_set1_epi32(x[r]);
                acc[r][0] = add_products(acc[r][0], low, four);
                acc[r][1] = add_products(acc[r][1], high, four);
            }
        }
        const __m512 low = _mm512_load_ps(scales), high = _mm512_load_ps(scales + 16);
        UNROLL for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(x_scale[r * w->spans + span]);
            float *to = sums + r * OUTPUTS;
            const __m512 before = _mm512_load_ps(to), after = _mm512_load_ps(to + 16);
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][0]), _mm512_mul_ps(low, scale), before));
            _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][1]), _mm512_mul_ps(high, scale), after));
        }
    }
}

static void tiles(const quantized_matrix *w, const __m512i *panel, const float *scales, const quantized_inputs *inputs,
                  int64_t first, int64_t last, float *sums) {
    for (int64_t x_row = 0, rows; x_row < inputs->rows; x_row += rows, sums += rows * OUTPUTS) {
        rows = tile_rows(inputs->rows - x_row);
        switch (rows) {
#define CASE(n) case n: tile_spans(w, panel, scales, inputs, x_row, first, last, sums, n); break
        CASE(4); CASE(5); CASE(6); CASE(7); CASE(8); CASE(9); CASE(10); CASE(11); CASE(12);
#undef CASE
        }
    }
}

static void many(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last) {
    __m512i panel[STRIP / 4 * 2];
    float sums[AT_ONCE * OUTPUTS] __attribute__((aligned(64))), scales[STRIP / WORD * OUTPUTS] __attribute__((aligned(64)));
    const int64_t strip = job->inputs->rows < 4 * TILE ? SHORT_STRIP : STRIP;
    for (int64_t row = first; row < last; row += OUTPUTS) {
        const uint8_t *p[OUTPUTS], *meta[OUTPUTS];
        for (int64_t k = 0; k < OUTPUTS; k++) {
            p[k] = code_row(w, row + k < last ? row + k : last - 1);
            meta[k] = meta_row(w, row + k < last ? row + k : last - 1);
        }
        memset(sums, 0, (size_t)(job->inputs->rows * OUTPUTS) * sizeof *sums);
        for (int64_t span = 0, next; span < w->spans; span = next) {
            const int64_t start = span_start(w, span);
            next = strip_end(w, span, strip);
            const int64_t begin = start / WORD, stop = (span_end(w, next - 1) + WORD - 1) / WORD;
            expand_half(w, p, meta, begin, stop, panel);
            expand_half(w, p + 16, meta + 16, begin, stop, panel + 1);
            for (int64_t k = 0; k < OUTPUTS; k++) {
                const int64_t from = (row + k < last ? row + k : last - 1) * w->groups;
                for (int64_t i = span; i < next; i++)
                    scales[(i - span) * OUTPUTS + k] = float_at(w->dtype, w->scale, from + span_group(w, i));
            }
            tiles(w, panel, scales, job->inputs, span, next, sums);
        }
        finish(w, job, row, last - row < OUTPUTS ? last - row : OUTPUTS, sums, OUTPUTS, 0);
    }
}

static void multiply_codes(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last) {
#define FEW_ROWS(bits, dense)                                                                                          \
    switch (job->inputs->rows) {                                                                                       \
    case 1: few(w, job, first, last, bits, dense, 1); break;                                                           \
    case 2: few(w, job, first, last, bits, dense, 2); break;                                                           \
    default: few(w, job, first, last, bits, dense, 3);                                                                 \
    }
    if (job->inputs->rows >= TILE_FROM) {
        many(w, job, first, last);
    } else if (w->bits == 8) {
        if (w->meta) FEW_ROWS(8, 0) else FEW_ROWS(8, 1)
    } else if (w->bits == 4) {
        if (w->meta) FEW_ROWS(4, 0) else FEW_ROWS(4, 1)
    } else {
        if (w->meta) FEW_ROWS(3, 0) else FEW_ROWS(3, 1)
    }
#undef FEW_ROWS
}

const quantized_kernel moonshot_quantized_vnni = QUANTIZED_KERNEL;
#else
const quantized_kernel moonshot_quantized_vnni; /* empty */
#endif
