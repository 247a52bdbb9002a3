/* x86-64 with AMX tiles of bfloat16, for several rows of inputs: rows of W are unpacked into tiles.
 *
 * These tiles have no float16. A float16 is the exact sum of two bfloat16 (11 bits of mantissa in 8 + 8), so a product
 * of two float16 is the exact sum of four products of bfloat16, computed from "planes".
 */
#include <stdlib.h>

#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512VBMI2__) && defined(__AVX512BF16__)
#define KEEP_STEPS
#include "bf16_lanes.h"
#include "rows.h"

enum {
    SIDE = 16,      /* rows of a tile, of 64 bytes: 32 inputs, or 16 sums */
    TILE = 1024,    /* bytes of a tile */
    DEPTH = 32,     /* inputs of a tile */
    PANEL = 2 * SIDE, /* rows of W, and of x, that are multiplied together: 4 of the 8 tiles hold sums */
    STRIP_OF_TILES = 256, /* inputs that are unpacked at a time: 16 KiB of a panel */
    BLOCKS = STRIP_OF_TILES / DEPTH,
    SUMS = 4 * 256, /* of a panel and two tiles of x */
    GROUP = SHARED / PANEL, /* panels that share a strip of x */
    HEAD = 64, /* bytes before the inputs: a flag for special values */
    LEAD = 64, /* extra bytes of a row to prefetch, since the number of values in a strip varies */
};

/* Planes: a float16 is HIGH + LOW; bfloat16 has only HIGH. Special values (infinity, NaN) are in HIGH only. Multiplied
 * with a LOW of 0 they would create NaN, so if there are any, LOW is multiplied with FINITE: HIGH with zeros in their
 * positions. */
enum { HIGH, LOW, FINITE, PLANES };

static const int own_planes[] = {[BF16] = 1, [F16] = PLANES}, terms[] = {[BF16] = 1, [F16] = 4};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_configuration;

/* Not every compiler knows that tile instructions read memory: this barrier completes the stores before them. */
INLINE void store_all(void) { __asm__ volatile("" ::: "memory"); }

/* Tiles 0 to 4 have rows of `width` bytes, the others of 64. */
static void configure(int width) {
    tile_configuration all = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) all.bytes[tile] = (uint16_t)(tile < 5 ? width : 64), all.rows[tile] = SIDE;
    store_all();
    _tile_loadconfig(&all);
}

INLINE int64_t depth_blocks(int64_t d_in) { return (d_in + WORD - 1) / WORD * (WORD / DEPTH); }

INLINE __m256i halves_of_floats(__m512 floats, const int dtype) {
    return dtype == F16 ? _mm512_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT) : (__m256i)_mm512_cvtneps_pbh(floats);
}

INLINE __m512 floats_of_halves(__m256i bits, const int dtype) {
    if (dtype == F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* Mask of special values among 32 float16. */
INLINE __mmask32 special(__m512i raw) {
    const __m512i exponent = _mm512_set1_epi16(0x7c00);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(raw, exponent), exponent);
}

/* Split 32 float16 into planes, `step` bytes apart; returns whether one is special. */
INLINE int split(__m512i raw, char *out, int64_t step) {
    const __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(raw));
    const __m512 last = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(raw, 1));
    const __m256i first_high = halves_of_floats(first, BF16), last_high = halves_of_floats(last, BF16);
    const __m512 first_low = _mm512_sub_ps(first, floats_of_halves(first_high, BF16));
    const __m512 last_low = _mm512_sub_ps(last, floats_of_halves(last_high, BF16));
    const __mmask32 which = special(raw);
    const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(last_low, first_low);
    _mm512_store_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(first_high), last_high, 1));
    _mm512_store_si512(out + step, _mm512_maskz_mov_epi16(~which, low));
    return which != 0;
}

/* Compute FINITE from HIGH, `bytes` of bfloat16. */
static void keep_finite(const char *high, char *finite, int64_t bytes) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int64_t i = 0; i < bytes; i += 64) {
        const __m512i raw = _mm512_load_si512(high + i);
        const __mmask32 here = _mm512_cmpneq_epi16_mask(_mm512_and_si512(raw, exponent), exponent);
        _mm512_store_si512(finite + i, _mm512_maskz_mov_epi16(here, raw));
    }
}

/* Load 32 inputs of 16 rows of x, padded with zeros. */
INLINE void load_block(const uint16_t *x, int64_t row, int64_t rows, int64_t first, int64_t d_in, __m512i *r) {
    const int64_t left = d_in - first;
    const __mmask32 there = left >= DEPTH ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    x += row * d_in + first;
    for (int i = 0; i < SIDE; i++, x += d_in)
        r[i] = row + i < rows && there ? _mm512_maskz_loadu_epi16(there, x) : _mm512_setzero_si512();
}

/* Layout of x: [strips][rows/16][planes][blocks] tiles of 16 pairs of inputs by 16 rows, as the tile product adds
 * pairs. A strip is contiguous, so that it stays in the second-level cache. */
INLINE int64_t prepared_bytes(int64_t rows, int64_t d_in, const int dtype) {
    return HEAD + (rows + PANEL - 1) / PANEL * 2 * own_planes[dtype] * depth_blocks(d_in) * TILE;
}

INLINE void prepare(const uint16_t *x, int64_t rows, int64_t d_in, char *prepared, const int dtype) {
    const int64_t sides = (rows + PANEL - 1) / PANEL * 2;
    int any = 0;
    char *out = prepared + HEAD;
    for (int64_t start = 0; start < d_in; start += STRIP_OF_TILES) {
        const int64_t blocks = depth_blocks(d_in - start < STRIP_OF_TILES ? d_in - start : STRIP_OF_TILES);
        for (int64_t side = 0; side < sides; side++, out += own_planes[dtype] * blocks * TILE)
            for (int64_t block = 0; block < blocks; block++) {
                __m512i r[SIDE];
                load_block(x, side * SIDE, rows, start + block * DEPTH, d_in, r);
                transpose(r);
                for (int i = 0; i < SIDE; i++) {
                    char *to = out + block * TILE + i * 64;
                    if (dtype == F16) any |= split(r[i], to, blocks * TILE);
                    else _mm512_store_si512(to, r[i]);
                }
            }
    }
    *(int *)prepared = any;
    if (!any) return;
    out = prepared + HEAD;
    for (int64_t start = 0; start < d_in; start += STRIP_OF_TILES) {
        const int64_t size = depth_blocks(d_in - start < STRIP_OF_TILES ? d_in - start : STRIP_OF_TILES) * TILE;
        for (int64_t side = 0; side < sides; side++, out += PLANES * size) keep_finite(out, out + FINITE * size, size);
    }
}

/* Rows of W that share a strip of x. */
typedef struct {
    const packed_matrix *w;
    int64_t first, last; /* rows of W */
    int64_t start, columns;
    const uint16_t *values[GROUP * PANEL]; /* next values of each row, from `start` on */
    int special; /* whether the unpacked panel has special values */
    const char *lines[PANEL * (STRIP_OF_TILES * 2 / 64 + 3)]; /* cache lines to prefetch: those unpacked next */
    int64_t line, last_line, at_once; /* prefetches per block of products */
} strip;

/* Unpack a panel, from row `from` of the strip on, into [planes][blocks][2] tiles; the values were prefetched. */
INLINE void unpack_tiles(strip *s, int64_t from, char *tiles, const int dtype) {
    const packed_matrix *w = s->w;
    const uint16_t *end = (const uint16_t *)w->values + w->stored;
    const int64_t bytes = (w->d_in + 7) / 8, rows = s->last - s->first;
    int any = 0;
    for (int64_t i = from; i < from + PANEL && i < rows; i++) {
        const uint8_t *meta = w->meta + (s->first + i) * bytes + s->start / 8;
        char *out = tiles + (i - from) * 64;
        const uint16_t *values = s->values[i];
#define KEEP(raw, column, step)                                                                                        \
    if (dtype == F16) any |= split(raw, out + (column) / DEPTH * 2 * TILE, BLOCKS * 2 * TILE);                         \
    else _mm512_store_si512(out + (column) / DEPTH * 2 * TILE, raw)
        EACH_STEP(values, end, meta, s->columns, FETCH_NOTHING, KEEP);
#undef KEEP
        s->values[i] = values;
    }
    s->special = any;
    if (any) keep_finite(tiles, tiles + FINITE * BLOCKS * 2 * TILE, BLOCKS * 2 * TILE);
}

/* Collect the cache lines that are unpacked after row `from` of the strip. They are prefetched during the products,
 * which do not use the memory bandwidth. */
static void find_lines(strip *s, int64_t from) {
    const packed_matrix *w = s->w;
    const int64_t bytes = (w->d_in + 7) / 8, rows = s->last - s->first;
    const int64_t all = 2 * s->columns, mean = w->stored / w->d_out * all / w->d_in, usual = mean < all ? mean : all;
    int64_t row = from + PANEL, start = s->start;
    if (row >= rows) { /* the next strip of the first panel, or the next rows */
        start += s->columns;
        row = start < w->d_in ? 0 : rows;
        start = start < w->d_in ? start : 0;
    }
    s->line = s->last_line = 0;
    for (int64_t i = row; i < row + PANEL && s->first + i < w->d_out; i++) {
        const uint16_t *values = i < rows ? s->values[i] : (const uint16_t *)w->values + row_start(w, s->first + i);
        s->lines[s->last_line++] = (const char *)w->meta + (s->first + i) * bytes + start / 8;
        for (int64_t at = start ? LEAD : 0; at < usual + 2 * LEAD; at += 64)
            s->lines[s->last_line++] = (const char *)values + at;
    }
}

/* Sums in tiles 0 to 3 += products along `blocks` tiles, with prefetches in between. */
INLINE void multiply_blocks(const char *w, const char *x, int64_t x_step, int64_t blocks, strip *s, const int sides) {
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t i = s->at_once; i && s->line < s->last_line; i--) _mm_prefetch(s->lines[s->line++], _MM_HINT_T1);
        _tile_loadd(4, w + block * 2 * TILE, 64);
        _tile_loadd(6, x + block * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w + block * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (sides == 2) {
            _tile_loadd(7, x + x_step + block * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* sums [2 tiles of W][2 tiles of x] += products of a panel; `sides` is the number of tiles of x. */
INLINE void multiply_tiles(const char *w, const char *x, int special_x, strip *s, float *sums, const int sides,
                           const int dtype) {
    const int64_t blocks = depth_blocks(s->columns), plane = BLOCKS * 2 * TILE, x_plane = blocks * TILE;
    const int64_t x_step = own_planes[dtype] * x_plane;
    store_all();
    if (s->start == 0) {
        _tile_zero(0);
        _tile_zero(2);
        if (sides == 2) {
            _tile_zero(1);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(2, sums + 2 * 256, 64);
        if (sides == 2) {
            _tile_loadd(1, sums + 256, 64);
            _tile_loadd(3, sums + 3 * 256, 64);
        }
    }
    multiply_blocks(w, x, x_step, blocks, s, sides);
    if (dtype == F16) {
        const char *w_high = w + (s->special ? FINITE : HIGH) * plane;
        const char *x_high = x + (special_x ? FINITE : HIGH) * x_plane;
        multiply_blocks(w_high, x + LOW * x_plane, x_step, blocks, s, sides);
        multiply_blocks(w + LOW * plane, x + LOW * x_plane, x_step, blocks, s, sides);
        multiply_blocks(w + LOW * plane, x_high, x_step, blocks, s, sides);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * 256, 64);
    if (sides == 2) {
        _tile_stored(1, sums + 256, 64);
        _tile_stored(3, sums + 3 * 256, 64);
    }
}

/* Write the outputs of a panel and 16 rows of x, whose sums are transposed in two tiles. Two rows of W are interleaved
 * into 32-bit lanes, so that one transposition suffices and each row of x is written as a full cache line. */
INLINE void write_outputs(const packed_matrix *w, const product *job, int64_t row, int64_t here, int64_t x_row,
                          const float *sums, const int dtype) {
    static const uint16_t by_turns[] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const int64_t x_rows = job->rows - x_row < SIDE ? job->rows - x_row : SIDE;
    const __mmask32 lanes = here < PANEL ? (1u << here) - 1 : ~0u;
    const __m512i turns = _mm512_loadu_si512(by_turns);
    uint16_t *y = (uint16_t *)job->y + x_row * w->d_out + row;
    float bias[PANEL] = {0};
    if (job->bias) {
        const __m512i raw = _mm512_maskz_loadu_epi16(lanes, (const uint16_t *)job->bias + row);
        _mm512_storeu_ps(bias, floats_of_halves(_mm512_castsi512_si256(raw), dtype));
        _mm512_storeu_ps(bias + SIDE, floats_of_halves(_mm512_extracti64x4_epi64(raw, 1), dtype));
    }
    __m512i r[SIDE];
    for (int i = 0; i < SIDE; i++) {
        const float *two = sums + i / 8 * 2 * 256 + i % 8 * 2 * SIDE;
        const __m512 even = _mm512_add_ps(_mm512_load_ps(two), _mm512_set1_ps(bias[2 * i]));
        const __m512 odd = _mm512_add_ps(_mm512_load_ps(two + SIDE), _mm512_set1_ps(bias[2 * i + 1]));
        const __m512i both = _mm512_castsi256_si512(halves_of_floats(even, dtype));
        r[i] = _mm512_permutexvar_epi16(turns, _mm512_inserti64x4(both, halves_of_floats(odd, dtype), 1));
    }
    transpose(r);
    for (int i = 0; i < x_rows; i++, y += w->d_out) _mm512_mask_storeu_epi16(y, lanes, r[i]);
}

/* Multiply the rows of W of one group, with sums [panels][pairs of tiles of x][4 tiles]. */
INLINE void multiply_group(strip *s, const product *job, char *tiles, float *sums, const int dtype) {
    const packed_matrix *w = s->w;
    const int64_t w_rows = s->last - s->first, pairs = (job->rows + PANEL - 1) / PANEL;
    const int special_x = *(const int *)job->x;
    const char *x = (const char *)job->x + HEAD;
    for (int64_t i = 0; i < w_rows; i++) s->values[i] = (const uint16_t *)w->values + row_start(w, s->first + i);
    for (s->start = 0; s->start < w->d_in; s->start += STRIP_OF_TILES) {
        s->columns = w->d_in - s->start < STRIP_OF_TILES ? w->d_in - s->start : STRIP_OF_TILES;
        const int64_t x_step = 2 * own_planes[dtype] * depth_blocks(s->columns) * TILE;
        for (int64_t panel = 0; panel * PANEL < w_rows; panel++) {
            float *to = sums + panel * pairs * SUMS;
            unpack_tiles(s, panel * PANEL, tiles, dtype);
            find_lines(s, panel * PANEL);
            s->at_once = s->last_line / (pairs * depth_blocks(s->columns) * terms[dtype]) + 1;
            for (int64_t pair = 0; pair < pairs; pair++, to += SUMS) {
                const char *pair_of_x = x + pair * x_step;
                if (job->rows - pair * PANEL > SIDE) multiply_tiles(tiles, pair_of_x, special_x, s, to, 2, dtype);
                else multiply_tiles(tiles, pair_of_x, special_x, s, to, 1, dtype);
            }
        }
        x += pairs * x_step;
    }
    for (int64_t x_row = 0; x_row < job->rows; x_row += SIDE)
        for (int64_t row = 0; row < w_rows; row += PANEL) {
            const float *from = sums + (row / PANEL * pairs + x_row / PANEL) * SUMS + x_row / SIDE % 2 * 256;
            write_outputs(w, job, s->first + row, w_rows - row, x_row, from, dtype);
        }
}

#include "amx_few.h"

INLINE void multiply(const packed_matrix *w, const product *job, int64_t first, int64_t last, const int dtype) {
    char tiles[PLANES * BLOCKS * 2 * TILE] __attribute__((aligned(64)));
    float local[AT_ONCE / PANEL * SUMS] __attribute__((aligned(64)));
    /* With many rows of x, several panels use a strip of x while it is in the cache; their sums are then in memory. */
    void *many = NULL;
    if (job->rows > 2 * PANEL && posix_memalign(&many, 64, GROUP * sizeof local)) many = NULL;
    const int64_t group = many ? GROUP * PANEL : PANEL;
    strip s = {.w = w};
    memset(tiles, 0, sizeof tiles);
    configure(64);
    for (s.first = first; s.first < last; s.first = s.last) {
        s.last = last - s.first < group ? last : s.first + group;
        multiply_group(&s, job, tiles, many ? many : local, dtype);
    }
    _tile_release();
    free(many);
}

#define FUNCTIONS(name, dtype)                                                                                         \
    static int64_t name##_tiles_prepared_bytes(int64_t rows, int64_t d_in) {                                           \
        return prepared_bytes(rows, d_in, dtype);                                                                      \
    }                                                                                                                  \
    static void name##_tiles_prepare(const void *x, int64_t rows, int64_t d_in, void *prepared) {                      \
        if (dtype == BF16 && rows <= MOST_FEW) prepare_few(x, rows, d_in, prepared);                                   \
        else prepare(x, rows, d_in, prepared, dtype);                                                                  \
    }                                                                                                                  \
    static void name##_tiles_multiply(const packed_matrix *w, const product *job, int64_t first, int64_t last) {       \
        if (dtype == BF16 && job->rows <= MOST_FEW) bf16_few(w, job, first, last);                                     \
        else multiply(w, job, first, last, dtype);                                                                     \
    }
FUNCTIONS(bf16, BF16)
FUNCTIONS(f16, F16)

/* For few rows of inputs, splitting float16 into planes costs more than the tiles save: hence `least`. */
const kernels moonshot_amx = {
    {NULL, bf16_tiles_multiply, bf16_tiles_prepared_bytes, bf16_tiles_prepare, 2, 0},
    {NULL, f16_tiles_multiply, f16_tiles_prepared_bytes, f16_tiles_prepare, FEW + 1, 0},
};
#else
const kernels moonshot_amx;
#endif
