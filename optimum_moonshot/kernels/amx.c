/* x86-64 with AMX tiles of bfloat16, for two rows of inputs or more: rows of W are unpacked into tiles. */
#include <stdlib.h>

#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512VBMI2__) && defined(__AVX512BF16__)
#define KEEP_STEPS
#include "bf16_lanes.h"
#include "rows.h"

enum {
    SIDE = 16,      /* rows of a tile, of 64 bytes: 32 inputs, or 16 sums */
    TILE = 1024,    /* its bytes */
    DEPTH = 32,     /* inputs of a tile */
    PANEL = 2 * SIDE, /* rows of W, and of x, that are multiplied together */
    STRIP_OF_TILES = 512, /* inputs that are unpacked at once: 32 KiB of a panel */
    BLOCKS = STRIP_OF_TILES / DEPTH,
    MOST_ROWS = 512, /* of x whose sums are kept at once: 64 KiB for a panel */
    GROUP = 8, /* panels that share a strip of x */
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_configuration;

static void configure(void) {
    tile_configuration all = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) all.bytes[tile] = 64, all.rows[tile] = SIDE;
    _tile_loadconfig(&all);
}

static int64_t depth_blocks(int64_t d_in) { return (d_in + WORD - 1) / WORD * (WORD / DEPTH); }

/* Tiles [rows/16, d_in/32] of 16 pairs of inputs by 16 rows: a pair of a row is what a sum takes at a time. */
static int64_t amx_prepared_bytes(int64_t rows, int64_t d_in) {
    return (rows + PANEL - 1) / PANEL * 2 * depth_blocks(d_in) * TILE;
}

static void amx_prepare(const void *x, int64_t rows, int64_t d_in, void *prepared) {
    const int64_t blocks = depth_blocks(d_in);
    const __m512i places = _mm512_mullo_epi32(_mm512_set1_epi32((int)d_in), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t row = 0; row < rows; row += SIDE) {
        const int64_t here = rows - row < SIDE ? rows - row : SIDE;
        const uint16_t *in = (const uint16_t *)x + row * d_in;
        __m512i *out = (__m512i *)((char *)prepared + row / SIDE * blocks * TILE);
        const __mmask16 lanes = (__mmask16)((1u << here) - 1);
        for (int64_t pair = 0; pair < d_in / 2; pair++)
            out[pair] = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, places, in + 2 * pair, 2);
        memset(out + d_in / 2, 0, (size_t)(blocks * SIDE - d_in / 2) * 64);
        if (d_in % 2)
            for (int64_t i = 0; i < here; i++) ((uint16_t *)(out + d_in / 2))[2 * i] = in[i * d_in + d_in - 1];
    }
}

/* sums [2 tiles of W][2 tiles of x] += the products along `blocks` tiles; `sides` is how many tiles of x there are. */
INLINE void multiply_tiles(const char *w, const char *x, int64_t x_step, int64_t blocks, float *sums, int fresh,
                           const int sides) {
    if (fresh) {
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
    for (int64_t block = 0; block < blocks; block++) {
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
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * 256, 64);
    if (sides == 2) {
        _tile_stored(1, sums + 256, 64);
        _tile_stored(3, sums + 3 * 256, 64);
    }
}

typedef struct {
    const packed_matrix *w;
    int64_t first, last; /* rows of W */
    int64_t start, columns;
    const uint16_t *values[GROUP * PANEL]; /* of each of these rows, from `start` on */
} strip;

/* Unpack a panel, from row `from` of the strip on; what is unpacked next is fetched. */
static void unpack_tiles(strip *s, int64_t from, char *tiles) {
    const packed_matrix *w = s->w;
    const uint16_t *base = w->values, *end = base + w->stored;
    const int64_t bytes = (w->d_in + 7) / 8, rows = s->last - s->first;
    const int64_t usual = w->stored / w->d_out * s->columns / w->d_in;
    for (int64_t i = from; i < from + PANEL && i < rows; i++) {
        const uint8_t *meta = w->meta + (s->first + i) * bytes + s->start / 8;
        char *out = tiles + (i - from) * 64;
        const uint16_t *values = s->values[i], *next = values;
        int64_t next_bits = 0;
        if (i + PANEL < rows) { /* the same inputs of the next panel */
            next = s->values[i + PANEL];
            next_bits = PANEL * bytes;
        } else if (s->start + s->columns < w->d_in) { /* the next inputs of the first panel */
            next = rows > PANEL ? s->values[i - from] : values + usual;
            next_bits = s->columns / 8 - from * bytes;
        } else if (s->last + i - from < w->d_out) { /* the next rows */
            next = base + row_start(w, s->last + i - from);
            next_bits = (s->last - s->first - from) * bytes - s->start / 8;
        }
        const int64_t ahead = (const char *)next - (const char *)values;
#define KEEP(raw, column, step) _mm512_store_si512(out + (column) / DEPTH * 2 * TILE, raw)
        EACH_STEP(values, end, meta, s->columns, ahead, next_bits, KEEP);
#undef KEEP
        s->values[i] = values;
    }
}

/* The sums of 16 rows of W by 16 of x lie transposed in a tile. */
static void write_outputs(const packed_matrix *w, const product *job, int64_t row, int64_t here, int64_t x_first,
                          int64_t rows, const float *sums) {
    const uint16_t *bias = job->bias;
    const __m512i column = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int64_t start = 0; start < here; start += SIDE) {
        const __mmask16 lanes = here - start < SIDE ? (__mmask16)((1u << (here - start)) - 1) : 0xffff;
        __m512 add = _mm512_setzero_ps();
        if (bias) {
            const __m256i bits = _mm256_maskz_loadu_epi16(lanes, bias + row + start);
            add = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
        for (int64_t x_row = 0; x_row < rows; x_row++) {
            const float *from = sums + (x_row / PANEL * 4 + start / SIDE * 2 + x_row / SIDE % 2) * 256 + x_row % SIDE;
            const __m512 sum = _mm512_add_ps(_mm512_i32gather_ps(column, from, 4), add);
            uint16_t *y = (uint16_t *)job->y + (x_first + x_row) * w->d_out + row + start;
            _mm256_mask_storeu_epi16(y, lanes, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

/* Rows of W of one group and up to MOST_ROWS rows of x, whose sums are kept: [panels][pairs of tiles of x][4 tiles]. */
static void multiply_group(strip *s, const product *job, int64_t x_first, char *tiles, float *sums) {
    const packed_matrix *w = s->w;
    const int64_t x_step = depth_blocks(w->d_in) * TILE, w_rows = s->last - s->first;
    const int64_t rows = job->rows - x_first < MOST_ROWS ? job->rows - x_first : MOST_ROWS;
    const int64_t pairs = (rows + PANEL - 1) / PANEL;
    for (int64_t i = 0; i < w_rows; i++) s->values[i] = (const uint16_t *)w->values + row_start(w, s->first + i);
    for (s->start = 0; s->start < w->d_in; s->start += STRIP_OF_TILES) {
        s->columns = w->d_in - s->start < STRIP_OF_TILES ? w->d_in - s->start : STRIP_OF_TILES;
        const char *x = (const char *)job->x + x_first / SIDE * x_step + s->start / DEPTH * TILE;
        for (int64_t panel = 0; panel * PANEL < w_rows; panel++) {
            float *to = sums + panel * pairs * 4 * 256;
            unpack_tiles(s, panel * PANEL, tiles);
            for (int64_t pair = 0; pair < pairs; pair++, to += 4 * 256) {
                const int64_t blocks = depth_blocks(s->columns);
                if (rows - pair * PANEL > SIDE)
                    multiply_tiles(tiles, x + 2 * pair * x_step, x_step, blocks, to, s->start == 0, 2);
                else multiply_tiles(tiles, x + 2 * pair * x_step, x_step, blocks, to, s->start == 0, 1);
            }
        }
    }
    for (int64_t row = 0; row < w_rows; row += PANEL) {
        const int64_t here = w_rows - row < PANEL ? w_rows - row : PANEL;
        write_outputs(w, job, s->first + row, here, x_first, rows, sums + row / PANEL * pairs * 4 * 256);
    }
}

static void amx_multiply(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    char tiles[BLOCKS * 2 * TILE] __attribute__((aligned(64))) = {0};
    float few[MOST_ROWS / PANEL * 4 * 256] __attribute__((aligned(64)));
    /* With many rows of x, a strip of them is read from the cache by several panels before the next. */
    void *many = NULL;
    if (job->rows > 2 * PANEL && posix_memalign(&many, 64, GROUP * sizeof few)) many = NULL;
    const int64_t group = many ? GROUP * PANEL : PANEL;
    strip s = {.w = w};
    configure();
    for (int64_t x_first = 0; x_first < job->rows; x_first += MOST_ROWS)
        for (s.first = first; s.first < last; s.first = s.last) {
            s.last = last - s.first < group ? last : s.first + group;
            multiply_group(&s, job, x_first, tiles, many ? many : few);
        }
    _tile_release();
    free(many);
}

const kernels moonshot_amx = {{NULL, amx_multiply, amx_prepared_bytes, amx_prepare}};
#else
const kernels moonshot_amx;
#endif
