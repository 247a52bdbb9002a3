/* Products with a quantized packed matrix: common definitions.
 *
 * W [d_out, d_in] consists of codes c of 8, 4 or 3 bits and scales s in the dtype of inputs and outputs, one for each
 * row and `group` inputs (a multiple of 64); the weight is c * s, rounded to the dtype. The codes of a row are stored by
 * blocks of 64 inputs: those of the surviving weights in the order of inputs, as c + 2^(bits - 1), `bits` bits each, the
 * least significant first, padded with zero bits to whole bytes. The bits of the surviving weights are as in kernels.h;
 * without them, all weights survive. Files may be damaged, so neither bits nor offsets are trusted: nothing beyond
 * `stored` bytes of codes, d_out rows of bits and d_in inputs is read.
 */
#ifndef MOONSHOT_QUANTIZED_H
#define MOONSHOT_QUANTIZED_H

#include "kernels.h"

#define UNROLL _Pragma("GCC unroll 16")
#define SPAN 4096 /* most inputs whose products are summed in 32-bit integers */
#define APART (SPAN + WORD) /* bytes from row to row of unpacked codes: not a power of two, for the sake of the cache */
#define START_LANES 16 /* most lanes of `start` */

typedef struct {
    const uint8_t *codes;
    int64_t stored;         /* bytes of codes */
    const uint8_t *meta;    /* [d_out, ceil(d_in/8)], or null if all weights survive */
    const int64_t *offsets; /* [d_out + 1], or null */
    int64_t per_row;        /* bytes of codes of every row, if offsets is null */
    const void *scale;      /* [d_out, groups] */
    int bits, dtype;
    int64_t group, groups, d_out, d_in;
    int64_t blocks, spans, per_group; /* of a row; spans of a group */
} quantized_matrix;

/* Rows of inputs, rounded to 8 bits with a scale for each group, or as float32 in `wide`. */
typedef struct {
    int8_t *x;    /* [rows, stride], padded with zeros, or in tiles (see `quantize`) */
    float *scale; /* [rows, spans] */
    int32_t *start; /* [rows, spans], or several lanes for each: sums of x times -2^(bits - 1), with which sums of products
                     * with c + 2^(bits - 1) become those with c */
    float *wide;    /* [rows, stride] */
    int64_t rows;
    int64_t *places; /* the row of y for each row of `wide` */
} quantized_inputs;

typedef struct {
    const quantized_inputs *inputs;
    const void *bias; /* [d_out], or null */
    void *y;          /* [rows, d_out] */
} quantized_job;

typedef struct {
    /* Dense rows first to last - 1, [last - first, d_in]. */
    void (*unpack)(const quantized_matrix *w, int64_t first, int64_t last, void *dense);
    /* Outputs first to last - 1 for all rows of inputs: rounded inputs; float32 inputs. */
    void (*multiply)(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last);
    void (*multiply_wide)(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last);
    /* Round inputs [rows, d_in] to `to`, with `row` as a buffer for `stride` floats. Rows with values that are not
     * finite, or too small to be scaled, become zeros; `to->places` lists them, and their number is returned. */
    int64_t (*quantize)(const quantized_matrix *w, const void *x, quantized_inputs *to, float *row);
    /* Inputs as float32: the rows of x that `to->places` lists. */
    void (*widen)(const quantized_matrix *w, const void *x, quantized_inputs *to);
} quantized_kernel;

/* The kernels of an instruction set; empty if the compiler does not support it. */
extern const quantized_kernel moonshot_quantized_portable, moonshot_quantized_avx2, moonshot_quantized_vnni,
    moonshot_quantized_amx, moonshot_quantized_neon;
extern const quantized_kernel *moonshot_quantized; /* the one in use */

/* Write codes and scales of dense [d_out, d_in] to w, whose bits and offsets are given. Returns 0, or -1 if a group is
 * not on the grid. */
int moonshot_pack_rows(const quantized_matrix *w, const void *dense, int threads);

/* Length of a row of inputs: whole blocks, and one more, so that rows of 2^n inputs use different sets of a cache. */
INLINE int64_t quantized_stride(const quantized_matrix *w) { return (w->blocks + 1) * WORD; }

/* Bytes of the codes of a block. */
INLINE int64_t code_bytes(uint64_t word, int bits) { return (__builtin_popcountll(word) * bits + 7) >> 3; }

INLINE uint64_t block_word(const quantized_matrix *w, const uint8_t *meta, int64_t block) {
    const int64_t columns = w->d_in - block * WORD;
    if (meta) return read_word(meta + block * 8, columns);
    return columns >= WORD ? ~0ull : (1ull << columns) - 1;
}

/* 64 bytes that can be read: those at p, or near the end a copy, padded with zeros. */
INLINE const uint8_t *readable(const uint8_t *p, const uint8_t *end, uint8_t *copy) {
    if (end - p >= WORD) return p;
    memset(copy, 0, WORD);
    if (end > p) memcpy(copy, p, (size_t)(end - p));
    return copy;
}

INLINE const uint8_t *meta_row(const quantized_matrix *w, int64_t row) {
    return w->meta ? w->meta + row * ((w->d_in + 7) / 8) : NULL;
}

INLINE const uint8_t *code_row(const quantized_matrix *w, int64_t row) {
    int64_t start = w->offsets ? w->offsets[row] : row * w->per_row;
    if (start < 0 || start > w->stored) start = w->stored;
    return w->codes + start;
}

/* A group is one span unless it is long. */
INLINE int64_t span_group(const quantized_matrix *w, int64_t span) {
    return w->per_group == 1 ? span : span / w->per_group;
}

INLINE int64_t span_start(const quantized_matrix *w, int64_t span) {
    if (w->per_group == 1) return span * w->group;
    return span / w->per_group * w->group + span % w->per_group * SPAN;
}

INLINE int64_t span_end(const quantized_matrix *w, int64_t span) {
    const int64_t end = span_start(w, span + 1);
    return end < w->d_in ? end : w->d_in;
}

/* The end of the spans from `span` on that have at most `most` inputs together, or of it alone. */
INLINE int64_t strip_end(const quantized_matrix *w, int64_t span, int64_t most) {
    int64_t next = span + 1;
    while (next < w->spans && span_end(w, next) <= span_start(w, span) + most) next++;
    return next;
}

INLINE float float_at(int dtype, const void *p, int64_t i) {
    if (dtype == BF16) return float_of_bf16(((const uint16_t *)p)[i]);
    if (dtype == F16) return float_of_f16(((const uint16_t *)p)[i]);
    return ((const float *)p)[i];
}

INLINE int dtype_bytes(int dtype) { return dtype == F32 ? 4 : 2; }

#endif
