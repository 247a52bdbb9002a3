/* Quantized matrices on x86-64 with AMX tiles of bytes, for a tile or more of rows of inputs; fewer are multiplied with
 * VNNI. Codes are signed here, since tiles multiply signed bytes. The sums are those of VNNI, bit for bit. */
#include "quantized.h"

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512VNNI__)
#include "avx512_codes.h"

static void multiply_tiles(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last);

#define VECTOR_BYTES 64
#define QUANTIZE(p, inverse, to) quantize_block(p, inverse, to)
#define EXPAND(p, word, bits, dense, to) expand_block(p, word, bits, dense, to)
#define MULTIPLY multiply_tiles
#define TILE 16
#define TILE_FROM TILE
#include "quantized_rows.h"

#define SIDE 16        /* rows of a tile, of 64 bytes */
#define OUTPUTS 32     /* rows of W that are multiplied together: two tiles of codes, and two of sums */
#define STRIP 1024     /* inputs that are expanded at a time: the codes fit the first-level cache */

/* The scales of inputs in tiles, [tiles][spans][SIDE], in place of `start`, which signed codes do not need. */
static int64_t quantize_tiles(const quantized_matrix *w, const void *x, quantized_inputs *to, float *row) {
    if (to->rows < TILE) return moonshot_quantized_vnni.quantize(w, x, to, row);
    const int64_t special = quantize(w, x, to, row);
    int32_t *tile = to->start;
    for (int64_t first = 0, width; first < to->rows; first += width) {
        width = tile_rows(to->rows - first);
        for (int64_t span = 0; span < w->spans; span++)
            for (int64_t r = 0; r < SIDE; r++) {
                const float scale = r < width ? to->scale[(first + r) * w->spans + span] : 0;
                *tile++ = (int32_t)bits_of_float(scale);
            }
    }
    return special;
}

static void configure(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) all.bytes[tile] = 64, all.rows[tile] = SIDE;
    __asm__ volatile("" ::: "memory"); /* not every compiler knows that the instruction reads memory */
    _tile_loadconfig(&all);
}

/* Add the products of spans first to last - 1 to the sums, [OUTPUTS][SIDE]. Inputs have `width` columns: beyond them
 * a tile has bytes of the next inputs, whose scales are 0. */
static void tile_spans(const quantized_matrix *w, const int8_t *codes, const float *scales, const int8_t *x,
                       int64_t width, const int32_t *x_scales, int64_t first, int64_t last, float *sums) {
    int32_t whole[OUTPUTS * SIDE] __attribute__((aligned(64)));
    for (int64_t span = first; span < last; span++, scales += OUTPUTS, x_scales += SIDE) {
        const int64_t blocks = (span_end(w, span) - span_start(w, span) + WORD - 1) / WORD;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t block = 0; block < blocks; block++, codes += WORD, x += WORD * width) {
            _tile_loadd(2, x, 4 * width);
            _tile_loadd(3, codes, APART);
            _tile_loadd(4, codes + SIDE * APART, APART);
            _tile_dpbssd(0, 3, 2);
            _tile_dpbssd(1, 4, 2);
        }
        _tile_stored(0, whole, 64);
        _tile_stored(1, whole + SIDE * SIDE, 64);
        __asm__ volatile("" ::: "memory");
        const __m512 x_scale = _mm512_castsi512_ps(_mm512_loadu_si512(x_scales));
        for (int k = 0; k < OUTPUTS; k++) {
            const __m512 products = _mm512_cvtepi32_ps(_mm512_load_si512(whole + k * SIDE));
            const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[k]), x_scale);
            _mm512_store_ps(sums + k * SIDE, _mm512_fmadd_ps(products, scale, _mm512_load_ps(sums + k * SIDE)));
        }
    }
}

/* From sums [tiles][OUTPUTS][SIDE] to [rows][OUTPUTS]. */
static void by_rows(const float *sums, int64_t rows, float *to) {
    for (int64_t first = 0, width; first < rows; first += width) {
        width = tile_rows(rows - first);
        for (int half = 0; half < OUTPUTS; half += SIDE, sums += SIDE * SIDE) {
            __m512i lanes[SIDE];
            for (int k = 0; k < SIDE; k++) lanes[k] = _mm512_load_si512(sums + k * SIDE);
            transpose(lanes);
            for (int64_t r = 0; r < width; r++) _mm512_store_si512(to + (first + r) * OUTPUTS + half, lanes[r]);
        }
    }
}

static void multiply_tiles(const quantized_matrix *w, const quantized_job *job, int64_t first, int64_t last) {
    const quantized_inputs *inputs = job->inputs;
    const int64_t rows = inputs->rows, stride = quantized_stride(w);
    int8_t codes[OUTPUTS * APART] __attribute__((aligned(64)));
    float sums[AT_ONCE * OUTPUTS] __attribute__((aligned(64))), outputs[AT_ONCE * OUTPUTS] __attribute__((aligned(64)));
    float scales[SPAN / WORD * OUTPUTS];
    if (rows < TILE) {
        moonshot_quantized_vnni.multiply(w, job, first, last);
        return;
    }
    configure();
    memset(codes, 0, sizeof codes); /* of rows beyond the last, too */
    memset(scales, 0, sizeof scales);
    for (int64_t row = first; row < last; row += OUTPUTS) {
        const int64_t count = last - row < OUTPUTS ? last - row : OUTPUTS;
        const uint8_t *p[OUTPUTS];
        for (int64_t k = 0; k < count; k++) p[k] = code_row(w, row + k);
        memset(sums, 0, (size_t)((rows + TILE - 1) / TILE * OUTPUTS * SIDE) * sizeof *sums);
        for (int64_t span = 0, next; span < w->spans; span = next) {
            const int64_t start = span_start(w, span);
            next = strip_end(w, span, STRIP);
            const int64_t end = (span_end(w, next - 1) + WORD - 1) / WORD;
            for (int64_t k = 0; k < count; k++) {
                p[k] = expand(w, p[k], meta_row(w, row + k), start / WORD, end, codes + k * APART);
                for (int64_t i = span; i < next; i++)
                    scales[(i - span) * OUTPUTS + k] = float_at(w->dtype, w->scale, (row + k) * w->groups + span_group(w, i));
            }
            for (int64_t x_row = 0, tile = 0, width; x_row < rows; x_row += width, tile++) {
                width = tile_rows(rows - x_row);
                const int32_t *x_scales = inputs->start + (tile * w->spans + span) * SIDE;
                tile_spans(w, codes, scales, inputs->x + x_row * stride + start * width, width, x_scales, span, next,
                           sums + tile * OUTPUTS * SIDE);
            }
        }
        by_rows(sums, rows, outputs);
        finish(w, job, row, count, outputs, OUTPUTS, 0);
    }
    _tile_release();
}

const quantized_kernel moonshot_quantized_amx = {unpack, multiply_tiles, multiply_wide, quantize_tiles, widen};
#else
const quantized_kernel moonshot_quantized_amx; /* empty */
#endif
