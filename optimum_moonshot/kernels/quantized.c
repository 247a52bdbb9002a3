/* The interface for Python to products with quantized matrices. */
#include <stdlib.h>

#include "parallel.h"
#include "quantized.h"

const quantized_kernel *moonshot_quantized;

static quantized_matrix matrix(int bits, int64_t group, int dtype, int64_t d_out, int64_t d_in, const uint8_t *codes,
                               int64_t stored, const uint8_t *meta, const int64_t *offsets, const void *scale) {
    const int64_t blocks = (d_in + WORD - 1) / WORD;
    if (group > blocks * WORD && blocks > 0) group = blocks * WORD;
    const int64_t groups = (d_in + group - 1) / group, per_group = (group + SPAN - 1) / SPAN;
    const int64_t spans = d_in / group * per_group + (d_in % group + SPAN - 1) / SPAN;
    const int64_t per_row = d_out ? stored / d_out : 0;
    return (quantized_matrix){codes, stored, meta,   offsets, per_row, scale,  bits,     dtype,
                              group, groups, d_out, d_in,    blocks,  spans, per_group};
}

typedef struct {
    const quantized_matrix *w;
    const quantized_job *job; /* the product to compute; null to unpack into `dense` */
    void *dense;
    int64_t first; /* row of W that is unpacked first */
    int wide;
} task;

static void process(const void *context, int64_t first, int64_t last) {
    const task *t = context;
    if (!t->job)
        moonshot_quantized->unpack(t->w, first, last,
                                   (char *)t->dense + (first - t->first) * t->w->d_in * dtype_bytes(t->w->dtype));
    else if (t->wide) moonshot_quantized->multiply_wide(t->w, t->job, first, last);
    else moonshot_quantized->multiply(t->w, t->job, first, last);
}

#define LEAST_ROWS 32 /* of a part, for several rows of inputs */

static void run(const task *t, int64_t last, int threads) {
    const quantized_matrix *w = t->w;
    const int64_t rows = t->job ? t->job->inputs->rows : 1, meta_bytes = w->meta ? (w->d_in + 7) / 8 : 0;
    row_task task = {process, t, w->offsets, w->per_row, 1, meta_bytes, t->first, last, 0, 0};
    moonshot_run(&task, threads, t->wide || !t->job ? 8 * rows : 1 + rows / 2, LEAST_ROWS);
}

/* Products with inputs in float32, for the rows that inputs->places lists. Returns 0, or -1 if out of memory. */
static int run_wide(const quantized_matrix *w, quantized_inputs *inputs, int64_t rows, const void *x, quantized_job job,
                    int threads) {
    quantized_inputs wide = {.rows = rows, .places = inputs->places};
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)(rows * quantized_stride(w)) * sizeof(float))) return -1;
    wide.wide = memory;
    moonshot_quantized->widen(w, x, &wide);
    job.inputs = &wide;
    const task t = {w, &job, NULL, 0, 1};
    run(&t, w->d_out, threads);
    free(memory);
    return 0;
}

/* Products of at most AT_ONCE rows of inputs. Returns 0, or -1 if out of memory. */
static int run_rows(const quantized_matrix *w, const void *x, int64_t rows, const void *bias, void *y, int wide,
                    int threads) {
    const int64_t stride = quantized_stride(w), spans = rows * w->spans;
    const size_t floats = (size_t)(stride + spans) * sizeof(float);
    const size_t whole = (size_t)(spans * START_LANES) * sizeof(int32_t);
    int64_t places[AT_ONCE], special = rows;
    quantized_inputs inputs = {.rows = rows, .places = places};
    const quantized_job job = {&inputs, bias, y};
    void *memory = NULL;
    for (int64_t i = 0; i < rows; i++) places[i] = i;
    if (wide) return run_wide(w, &inputs, rows, x, job, threads);
    /* The rounded inputs, a row as float and rounded, and for each span a scale and lanes of sums. */
    if (posix_memalign(&memory, 64, (size_t)((rows + 1) * stride) + floats + whole)) return -1;
    inputs.x = memory;
    float *row = (float *)(inputs.x + rows * stride);
    inputs.scale = (float *)((char *)(row + stride) + stride);
    inputs.start = (int32_t *)(inputs.scale + spans);
    special = moonshot_quantized->quantize(w, x, &inputs, row);
    const task t = {w, &job, NULL, 0, 0};
    if (special < rows) run(&t, w->d_out, threads);
    free(memory);
    return special ? run_wide(w, &inputs, special, x, job, threads) : 0;
}

/* y [rows, d_out] = x [rows, d_in] W^T + bias, all of one dtype. Inputs are rounded to 8 bits, with a scale for each row
 * and group, unless `wide`; rows with values that are not finite are multiplied in float32. Returns 0, or -1 if out of
 * memory. */
PUBLIC int moonshot_quantized_product(int bits, int64_t group, int dtype, int64_t d_out, int64_t d_in,
                                      const uint8_t *codes, int64_t stored, const uint8_t *meta, const int64_t *offsets,
                                      const void *scale, const void *x, int64_t rows, const void *bias, void *y,
                                      int wide, int threads) {
    const quantized_matrix w = matrix(bits, group, dtype, d_out, d_in, codes, stored, meta, offsets, scale);
    const int bytes = dtype_bytes(dtype);
    for (int64_t first = 0, count; first < rows && d_out > 0; first += count) {
        count = rows - first < AT_ONCE ? rows - first : AT_ONCE;
        const void *inputs = (const char *)x + first * d_in * bytes;
        if (run_rows(&w, inputs, count, bias, (char *)y + first * d_out * bytes, wide, threads)) return -1;
    }
    return 0;
}

/* As moonshot_grouped with a quantized W: y [sum of counts, d_out / groups]. Returns as moonshot_quantized_product. */
PUBLIC int moonshot_quantized_grouped(int bits, int64_t group, int dtype, int64_t d_out, int64_t d_in,
                                      const uint8_t *codes, int64_t stored, const uint8_t *meta, const int64_t *offsets,
                                      const void *scale, int64_t groups, const int64_t *counts, const void *x, void *y,
                                      int wide, int threads) {
    const int64_t bytes = dtype_bytes(dtype), size = d_out / groups, width = (d_in + 7) / 8;
    const int64_t scales = (d_in + group - 1) / group, regular = offsets ? 0 : stored / groups;
    for (int64_t number = 0, first = 0; number < groups; first += counts[number++]) {
        if (!counts[number]) continue;
        const int64_t row = number * size;
        const int failed = moonshot_quantized_product(
            bits, group, dtype, size, d_in, codes + number * regular, offsets ? stored : regular,
            meta ? meta + row * width : NULL, offsets ? offsets + row : NULL,
            (const char *)scale + row * scales * bytes, (const char *)x + first * d_in * bytes, counts[number], NULL,
            (char *)y + first * size * bytes, wide, threads);
        if (failed) return failed;
    }
    return 0;
}

/* Dense rows first to last - 1 of W, [last - first, d_in]. */
PUBLIC void moonshot_quantized_unpack(int bits, int64_t group, int dtype, int64_t d_out, int64_t d_in,
                                      const uint8_t *codes, int64_t stored, const uint8_t *meta, const int64_t *offsets,
                                      const void *scale, int64_t first, int64_t last, void *dense, int threads) {
    const quantized_matrix w = matrix(bits, group, dtype, d_out, d_in, codes, stored, meta, offsets, scale);
    const task t = {&w, NULL, dense, first, 0};
    run(&t, last, threads);
}

/* Write codes and scale from dense [d_out, d_in]; meta and offsets are given. Returns as moonshot_pack_rows. */
PUBLIC int moonshot_quantized_pack(int bits, int64_t group, int dtype, int64_t d_out, int64_t d_in, uint8_t *codes,
                                   int64_t stored, const uint8_t *meta, const int64_t *offsets, void *scale,
                                   const void *dense, int threads) {
    const quantized_matrix w = matrix(bits, group, dtype, d_out, d_in, codes, stored, meta, offsets, scale);
    return moonshot_pack_rows(&w, dense, threads);
}

/* offsets [d_out + 1]: the bytes of codes of all rows before each row. */
PUBLIC void moonshot_quantized_offsets(int bits, int64_t d_out, int64_t d_in, const uint8_t *meta, int64_t *offsets) {
    const int64_t bytes = (d_in + 7) / 8;
    int64_t total = 0;
    for (int64_t row = 0; row < d_out; row++, meta += bytes) {
        offsets[row] = total;
        for (int64_t column = 0; column < d_in; column += WORD)
            total += code_bytes(read_word(meta + column / 8, d_in - column), bits);
    }
    offsets[d_out] = total;
}
