/* x86-64 with AMX tiles of bfloat16, for two rows of inputs or more: rows of W are unpacked into tiles. */
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
    MOST_ROWS = 1024, /* of x whose sums are kept at once: 128 KiB */
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

/* Inputs start to start + columns of a panel; the strip that comes next, or the next panel's first, is fetched. */
static void unpack_tiles(const packed_matrix *w, const uint16_t **p, int64_t row, int64_t here, int64_t start,
                         int64_t columns, char *tiles) {
    const uint16_t *base = w->values, *end = base + w->stored;
    const int64_t bytes = (w->d_in + 7) / 8;
    const int more = start + columns < w->d_in;
    for (int64_t i = 0; i < here; i++) {
        const uint8_t *meta = w->meta + (row + i) * bytes + start / 8;
        char *out = tiles + i * 64;
        const uint16_t *values = p[i];
        int64_t ahead = w->stored / w->d_out * 2 * STRIP_OF_TILES / w->d_in, ahead_bits = STRIP_OF_TILES / 8;
        if (!more && row + PANEL + i < w->d_out) {
            ahead = (const char *)(base + row_start(w, row + PANEL + i)) - (const char *)values;
            ahead_bits = PANEL * bytes - start / 8;
        }
#define KEEP(raw, column, step) _mm512_store_si512(out + (column) / DEPTH * 2 * TILE, raw)
        EACH_STEP(values, end, meta, columns, ahead, ahead_bits, KEEP);
#undef KEEP
        p[i] = values;
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

/* All rows of W from first on, and rows of x from x_first on: at most MOST_ROWS. */
static void multiply_panels(const packed_matrix *w, const product *job, int64_t first, int64_t last, int64_t x_first) {
    const int64_t d_in = w->d_in, x_step = depth_blocks(d_in) * TILE;
    const int64_t rows = job->rows - x_first < MOST_ROWS ? job->rows - x_first : MOST_ROWS;
    const char *x = (const char *)job->x + x_first / SIDE * x_step;
    char tiles[BLOCKS * 2 * TILE] __attribute__((aligned(64)));
    float sums[MOST_ROWS / PANEL * 4 * 256] __attribute__((aligned(64)));
    for (int64_t row = first; row < last; row += PANEL) {
        const int64_t here = last - row < PANEL ? last - row : PANEL;
        const uint16_t *p[PANEL];
        for (int64_t i = 0; i < here; i++) p[i] = (const uint16_t *)w->values + row_start(w, row + i);
        if (here < PANEL) memset(tiles, 0, sizeof tiles);
        for (int64_t start = 0; start < d_in; start += STRIP_OF_TILES) {
            const int64_t columns = d_in - start < STRIP_OF_TILES ? d_in - start : STRIP_OF_TILES;
            const int64_t blocks = depth_blocks(columns);
            const char *x_strip = x + start / DEPTH * TILE;
            unpack_tiles(w, p, row, here, start, columns, tiles);
            for (int64_t pair = 0; pair * PANEL < rows; pair++) {
                const char *x_pair = x_strip + 2 * pair * x_step;
                float *to = sums + pair * 4 * 256;
                if (rows - pair * PANEL > SIDE) multiply_tiles(tiles, x_pair, x_step, blocks, to, start == 0, 2);
                else multiply_tiles(tiles, x_pair, x_step, blocks, to, start == 0, 1);
            }
        }
        write_outputs(w, job, row, here, x_first, rows, sums);
    }
}

static void amx_multiply(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    configure();
    for (int64_t x_first = 0; x_first < job->rows; x_first += MOST_ROWS)
        multiply_panels(w, job, first, last, x_first);
    _tile_release();
}

const kernels moonshot_amx = {{NULL, amx_multiply, amx_prepared_bytes, amx_prepare}};
#else
const kernels moonshot_amx;
#endif
