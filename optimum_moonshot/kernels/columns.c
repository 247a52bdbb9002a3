/* Loops over the columns of a block of weights, whose rows are independent: those of SparseGPT's sweep and of the
 * descent over quantized codes. In Python a column takes ten calls of torch, 120 microseconds for 576 rows.
 *
 * Rows are transposed in tiles, so that a vector holds one column of several rows. Every operation is rounded as in
 * torch, without fused ones (setup.py), so that results are bit-identical to those of the loops in Python. */
#include "kernels.h"
#include "parallel.h"

enum { TILE = 16, WIDEST_BLOCK = 256 }; /* rows, and columns: a tile of floats is 16 KiB */

/* The block of a matrix in row-major order; `step` is null without a grid. */
typedef struct {
    int64_t width, stride; /* columns, and elements between rows of `weight` and `keep` */
    float *weight;
    uint8_t *keep;
    const float *step; /* [rows, width]: the scales of the weights */
    float top;         /* the largest code */
    int dtype;         /* of the values on the grid */
    /* Of the sweep: keep n of every m columns; m is 0 where `keep` is given. */
    int64_t n, m;
    const float *factor; /* [width, width] */
    const uint8_t *alive; /* [rows, width], or null */
    int64_t errors_stride;
    float *errors;
    /* Of the descent: */
    const float *curvature; /* [width, width] */
    const float *slopes;    /* [rows, width] */
} block;

typedef float tile[WIDEST_BLOCK][TILE];

INLINE void load(tile to, const float *from, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t column = 0; column < width; column++)
        for (int64_t row = 0; row < TILE; row++) to[column][row] = row < rows ? from[row * stride + column] : 0;
}

INLINE void store(const tile from, float *to, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < width; column++) to[row * stride + column] = from[column][row];
}

/* The nearest values on the grid, as Grid.rounded. */
INLINE void round_to_grid(float *values, const float *step, float top, int dtype) {
    const float magic = 0x1.8p23f; /* adding and subtracting it rounds to integers, ties to even */
    for (int row = 0; row < TILE; row++) {
        float code = values[row] / (step[row] == 0 ? 1 : step[row]);
        code = code < -top ? -top : code > top ? top : code;
        values[row] = ((code + magic) - magic) * step[row];
    }
    if (dtype == BF16)
        for (int row = 0; row < TILE; row++) values[row] = float_of_bf16(bf16_of_float(values[row]));
    if (dtype == F16)
        for (int row = 0; row < TILE; row++) values[row] = float_of_f16(f16_of_float(values[row]));
}

/* The mask of m columns from `first` on: of equal scores, the first ones are removed. */
INLINE void select_columns(const block *b, const tile weight, int64_t first, const uint8_t *alive, uint8_t *keep,
                           int64_t rows) {
    float scores[WIDEST_BLOCK][TILE];
    int32_t smaller[WIDEST_BLOCK][TILE];
    for (int64_t i = 0; i < b->m; i++) {
        const float pivot = b->factor[(first + i) * (b->width + 1)];
        for (int row = 0; row < TILE; row++) {
            const float ratio = weight[first + i][row] / pivot;
            scores[i][row] = ratio * ratio;
            smaller[i][row] = 0;
        }
        for (int64_t row = 0; alive && row < rows; row++)
            if (!alive[row * b->width + first + i]) scores[i][row] = -__builtin_inff();
        for (int64_t j = 0; j < i; j++)
            for (int row = 0; row < TILE; row++) {
                const int32_t less = scores[i][row] < scores[j][row];
                smaller[j][row] += less;
                smaller[i][row] += 1 - less;
            }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < b->m; i++)
            keep[row * b->stride + first + i] =
                smaller[i][row] >= b->m - b->n && (!alive || alive[row * b->width + first + i]);
}

static void sweep(const void *context, int64_t first, int64_t last) {
    const block *b = context;
    tile weight, errors, step;
    for (int64_t at = first; at < last; at += TILE) {
        const int64_t rows = last - at < TILE ? last - at : TILE;
        float *weights = b->weight + at * b->stride;
        uint8_t *keep = b->keep + at * b->stride;
        load(weight, weights, b->stride, rows, b->width);
        if (b->step) load(step, b->step + at * b->width, b->width, rows, b->width);
        for (int64_t column = 0; column < b->width; column++) {
            const float *factor = b->factor + column * b->width;
            float error[TILE];
            if (b->m && column % b->m == 0)
                select_columns(b, weight, column, b->alive ? b->alive + at * b->width : 0, keep, rows);
            memcpy(error, weight[column], sizeof error);
            if (b->step) round_to_grid(error, step[column], b->top, b->dtype);
            for (int64_t row = 0; row < rows; row++) {
                const int survives = keep[row * b->stride + column];
                const float removed = b->step ? weight[column][row] - (survives ? error[row] : 0) : weight[column][row];
                error[row] = survives && !b->step ? 0 : removed / factor[column];
            }
            memcpy(errors[column], error, sizeof error);
            for (int64_t k = column; k < b->width; k++)
                for (int row = 0; row < TILE; row++) weight[k][row] -= error[row] * factor[k];
        }
        store(weight, weights, b->stride, rows, b->width);
        store(errors, b->errors + at * b->errors_stride, b->errors_stride, rows, b->width);
    }
}

static void descend(const void *context, int64_t first, int64_t last) {
    const block *b = context;
    tile weight, slopes, step;
    for (int64_t at = first; at < last; at += TILE) {
        const int64_t rows = last - at < TILE ? last - at : TILE;
        float *weights = b->weight + at * b->stride;
        const uint8_t *keep = b->keep + at * b->stride;
        load(weight, weights, b->stride, rows, b->width);
        load(step, b->step + at * b->width, b->width, rows, b->width);
        load(slopes, b->slopes + at * b->width, b->width, rows, b->width);
        for (int64_t column = 0; column < b->width; column++) {
            const float *curvature = b->curvature + column * b->width, bend = curvature[column];
            const float safe = bend < 0x1p-126f ? 0x1p-126f : bend;
            float change[TILE] = {0}, candidate[TILE], *value = weight[column], *slope = slopes[column];
            if (!(bend > 0)) continue;
            for (int row = 0; row < TILE; row++) candidate[row] = value[row] - slope[row] / safe;
            round_to_grid(candidate, step[column], b->top, b->dtype);
            for (int64_t row = 0; row < rows; row++) {
                const float by = keep[row * b->stride + column] ? candidate[row] - value[row] : 0;
                if (by * (2 * slope[row] + by * bend) >= 0) continue; /* the loss would not decrease */
                change[row] = by;
                value[row] = candidate[row];
            }
            for (int64_t k = column + 1; k < b->width; k++)
                for (int row = 0; row < TILE; row++) slopes[k][row] += curvature[k] * change[row];
        }
        store(weight, weights, b->stride, rows, b->width);
    }
}

static int run_rows(const block *b, int64_t rows, int threads, void (*process)(const void *, int64_t, int64_t)) {
    if (b->width > WIDEST_BLOCK) return -1;
    row_task task = {process, b, 0, b->width, 4, 0, 0, rows, 0, 0};
    moonshot_run(&task, threads, b->width, TILE);
    return 0;
}

/* SparseGPT's sweep over a block of columns: selects `keep` (m > 0), writes `errors`, and updates `weight`. Returns 0,
 * or -1 for a block that is too wide. */
PUBLIC int moonshot_sweep(int64_t rows, int64_t width, float *weight, uint8_t *keep, int64_t stride, const float *factor,
                          float *errors, int64_t errors_stride, int64_t n, int64_t m, const uint8_t *alive,
                          const float *step, float top, int dtype, int threads) {
    const block b = {width, stride, weight, keep, step, top, dtype, n, m, factor, alive, errors_stride, errors, 0, 0};
    return run_rows(&b, rows, threads, sweep);
}

/* Coordinate descent over the codes of a block of columns: updates `weight`, which is on the grid of `step`. Returns as
 * moonshot_sweep. */
PUBLIC int moonshot_descend(int64_t rows, int64_t width, float *weight, const uint8_t *keep, int64_t stride,
                            const float *slopes, const float *curvature, const float *step, float top, int dtype,
                            int threads) {
    const block b = {width, stride, weight, (uint8_t *)keep, step, top, dtype, 0, 0, 0, 0, 0, 0, curvature, slopes};
    return run_rows(&b, rows, threads, descend);
}
