/* Up to 64 rows of x in bfloat16, as a software pipeline: unpacking 16 rows of W overlaps with the tile products of the
 * previous 16, on different execution units, and with sequential prefetches of the next. Included by amx.c only.
 */

enum {
    MOST_FEW = 4 * SIDE,    /* most rows of x: a tile of sums for each 16 */
    WIDE_PANEL = 96 << 10,  /* most bytes of 32 rows of W, so that they and the next 32 fit the second-level cache */
    TOGETHER = SIDE / BLOCKS, /* rows that are unpacked per tile product */
    PAGE = 4096,
};

/* Up to 16 rows of W and up to a strip of inputs that are unpacked together. */
typedef struct {
    int64_t row, rows, start, columns;
    int place; /* index of its tiles of sums */
} unit;

/* Memory that is prefetched sequentially, some cache lines at a time. */
typedef struct {
    const char *at;
    int64_t lines;
} stream;

/* A panel is the 16 or 32 rows of W whose sums are in tiles at the same time. */
typedef struct {
    const packed_matrix *w;
    const product *job;
    int64_t first, last, panel; /* rows of W, and of a panel */
    const uint16_t *at[PANEL];  /* next values of each row of the panel */
    stream values, bits;        /* of the next panel */
    char tiles[2][BLOCKS * TILE] __attribute__((aligned(64))); /* of two units: one written, one read */
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
} few;

/* Bytes of a row of a tile of x: fewer than 16 rows of x use narrower tiles, which need less cache and bandwidth. */
INLINE int64_t few_width(int64_t rows) { return rows <= 2 ? 8 : rows <= 4 ? 16 : rows <= 8 ? 32 : 64; }

/* Layout of x: [blocks][sides] tiles of 16 pairs of inputs. */
static void prepare_few(const uint16_t *x, int64_t rows, int64_t d_in, char *prepared) {
    const int64_t width = few_width(rows), blocks = depth_blocks(d_in);
    const __mmask16 lanes = (__mmask16)((1u << width / 4) - 1);
    char *out = prepared + HEAD;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t row = 0; row < rows; row += SIDE) {
            __m512i r[SIDE];
            load_block(x, row, rows, block * DEPTH, d_in, r);
            transpose(r);
            for (int i = 0; i < SIDE; i++, out += width) _mm512_mask_storeu_epi32(out, lanes, r[i]);
        }
}

/* Prefetch the next lines. When a page begins, also prefetch the first lines of the page after it, to hide its
 * TLB miss. */
INLINE void fetch(stream *s) {
    const uintptr_t before = (uintptr_t)s->at;
    for (int64_t i = 0; i < s->lines; i++, s->at += 64) _mm_prefetch(s->at, _MM_HINT_T1);
    if ((before ^ (uintptr_t)s->at) & PAGE)
        for (int64_t i = 0; i < 4; i++) _mm_prefetch(s->at - (uintptr_t)s->at % PAGE + PAGE + 64 * i, _MM_HINT_T1);
}

/* The stream of all lines from `from` to `to`, in `times` calls of fetch. */
INLINE stream stream_of(const void *from, const void *to, int64_t times) {
    if (from == to) return (stream){from, 0};
    return (stream){from, ((const char *)to - (const char *)from + 64 * times - 1) / (64 * times)};
}

static void fetch_panel(few *s, int64_t row, int64_t times) {
    const packed_matrix *w = s->w;
    const int64_t bytes = (w->d_in + 7) / 8, from = row < s->last ? row : s->last;
    const int64_t to = from + s->panel < s->last ? from + s->panel : s->last;
    const uint16_t *values = w->values;
    s->values = stream_of(values + row_start(w, from), values + row_start(w, to), times);
    s->bits = stream_of(w->meta + from * bytes, w->meta + to * bytes, times);
}

static void begin_panel(few *s, int64_t row) {
    const packed_matrix *w = s->w;
    const int64_t strips = (w->d_in + STRIP_OF_TILES - 1) / STRIP_OF_TILES;
    if (row == s->first) { /* not prefetched by a previous panel */
        fetch_panel(s, row, 1);
        fetch(&s->values);
        fetch(&s->bits);
    }
    fetch_panel(s, row + s->panel, strips * s->panel / TOGETHER);
    for (int64_t i = row; i < row + s->panel && i < s->last; i++)
        s->at[i - row] = (const uint16_t *)w->values + row_start(w, i);
}

static unit unit_at(const few *s, int64_t row, int64_t start, int place) {
    const int64_t rows = s->last - row, columns = s->w->d_in - start;
    unit at = {row, rows < SIDE ? rows : SIDE, start, columns < STRIP_OF_TILES ? columns : STRIP_OF_TILES, place};
    if (rows < 0) at.rows = 0;
    return at;
}

/* The next unit, in the order rows of a panel in a strip, strips of the panel, panels; one without rows at the end. */
static unit unit_after(const few *s, const unit *now) {
    const int64_t panel = now->row - now->place * SIDE, row = now->row + SIDE, start = now->start + STRIP_OF_TILES;
    if (row < panel + s->panel && row < s->last) return unit_at(s, row, now->start, now->place + 1);
    if (start < s->w->d_in) return unit_at(s, panel, start, 0);
    return unit_at(s, panel + s->panel, 0, 0);
}

/* Unpack 256 inputs of a row, without checks for the end of the values. */
INLINE const uint16_t *unpack_strip(const uint16_t *values, const uint8_t *meta, char *out) {
    PRAGMA_UNROLL for (int block = 0; block < BLOCKS; block += 2) {
        const uint64_t bits = read_word(meta + block * DEPTH / 8, WORD);
        _mm512_store_si512(out + block * TILE, expand_halves(values, (uint32_t)bits));
        values += __builtin_popcount((uint32_t)bits);
        _mm512_store_si512(out + block * TILE + TILE, expand_halves(values, bits >> 32));
        values += __builtin_popcount((uint32_t)(bits >> 32));
    }
    return values;
}

/* Unpack `columns` inputs of a row, at most a strip, with checks. Not inlined: it is rare. */
static __attribute__((noinline)) const uint16_t *unpack_ragged(const uint16_t *values, const uint16_t *end,
                                                               const uint8_t *meta, int64_t columns, char *out) {
#define KEEP(raw, column, step) _mm512_store_si512(out + (column) / DEPTH * TILE, raw)
    EACH_STEP(values, end, meta, columns, FETCH_NOTHING, KEEP);
#undef KEEP
    return values;
}

/* Sums of a place, in the tiles from sides * place on, += products of a tile of W and the tiles of x. Tile numbers must
 * be constants, hence the switch. */
INLINE void multiply_block(const char *w, const char *x, int64_t width, int place, const int sides) {
    _tile_loadd(4, x, width);
    _tile_loadd(5, w, 64);
    if (sides > 1) _tile_loadd(6, x + TILE, 64);
    if (sides > 2) _tile_loadd(7, x + 2 * TILE, 64);
    switch (sides * place) {
    case 0:
        _tile_dpbf16ps(0, 5, 4);
        if (sides > 1) _tile_dpbf16ps(1, 5, 6);
        if (sides > 2) _tile_dpbf16ps(2, 5, 7);
        if (sides < 4) break;
        _tile_loadd(4, x + 3 * TILE, 64);
        _tile_dpbf16ps(3, 5, 4);
        break;
    case 1: _tile_dpbf16ps(1, 5, 4); break;
    default:
        _tile_dpbf16ps(2, 5, 4);
        if (sides > 1) _tile_dpbf16ps(3, 5, 6);
    }
}

/* Write the outputs of 16 rows of W and 16 of x, whose sums are transposed in a tile. */
INLINE void write_sums(const packed_matrix *w, const product *job, int64_t row, int64_t here, int64_t x_row,
                       const float *sums) {
    const int64_t x_rows = job->rows - x_row < SIDE ? job->rows - x_row : SIDE;
    const __mmask16 lanes = here < SIDE ? (__mmask16)((1u << here) - 1) : 0xffff;
    const uint16_t *bias = job->bias;
    __m512 add = _mm512_setzero_ps();
    if (bias) add = floats_of_halves(_mm256_maskz_loadu_epi16(lanes, bias + row), BF16);
    uint16_t *y = (uint16_t *)job->y + x_row * w->d_out + row;
    __m512i r[SIDE];
    for (int i = 0; i < SIDE; i++) r[i] = _mm512_load_si512(sums + i * SIDE);
    transpose(r);
    for (int i = 0; i < x_rows; i++, y += w->d_out)
        _mm256_mask_storeu_epi16(y, lanes, halves_of_floats(_mm512_add_ps(_mm512_castsi512_ps(r[i]), add), BF16));
}

INLINE void take_sums(int tile, float *sums) {
#define TAKE(tile)                                                                                                     \
    _tile_stored(tile, sums, 64);                                                                                      \
    _tile_zero(tile)
    switch (tile) {
    case 0: TAKE(0); break;
    case 1: TAKE(1); break;
    case 2: TAKE(2); break;
    default: TAKE(3);
    }
#undef TAKE
}

/* Unpack `now` into `out` and multiply `before`, whose tiles are `tiles`; either may be empty. Interleaved by blocks,
 * so that unpacking and products overlap. */
INLINE void step(few *s, const unit *now, const unit *before, char *out, const char *tiles, const int sides,
                 const int whole) {
    const packed_matrix *w = s->w;
    const int64_t width = few_width(s->job->rows), x_step = sides * SIDE * width, bytes = (w->d_in + 7) / 8;
    const int64_t rows = now->rows, columns = now->columns, blocks = before->rows ? depth_blocks(before->columns) : 0;
    const char *x = (const char *)s->job->x + HEAD + before->start / DEPTH * x_step;
    const uint8_t *meta = w->meta + now->row * bytes + now->start / 8;
    const uint16_t **at = s->at + now->place * SIDE, *end = (const uint16_t *)w->values + w->stored;
    const int place = before->place;
    stream values = s->values, bits = s->bits;
    store_all();
    for (int64_t block = 0; block < BLOCKS; block++, x += x_step) {
        fetch(&values);
        fetch(&bits);
        for (int i = 0; i < TOGETHER; i++, at++, meta += bytes, out += 64) {
            if (whole) *at = unpack_strip(*at, meta, out);
            else if (TOGETHER * block + i < rows) *at = unpack_ragged(*at, end, meta, columns, out);
        }
        if (block < blocks) multiply_block(tiles + block * TILE, x, width, place, sides);
    }
    s->values = values;
    s->bits = bits;
}

/* Whether a unit has 16 rows and a whole strip, and all its values end well before the last one, even if damaged bits
 * have advanced the pointers. */
INLINE int is_whole(const few *s, const unit *now) {
    const uint16_t *end = (const uint16_t *)s->w->values + s->w->stored;
    int whole = now->rows == SIDE && now->columns == STRIP_OF_TILES;
    for (int i = 0; i < SIDE && whole; i++) whole = end - s->at[now->place * SIDE + i] >= STRIP_OF_TILES + DEPTH;
    return whole;
}

INLINE void multiply_few(const packed_matrix *w, const product *job, int64_t first, int64_t last, const int sides) {
    few s = {.w = w, .job = job, .first = first, .last = last, .panel = PANEL};
    const int64_t unit_bytes = (w->stored / w->d_out * 2 + (w->d_in + 7) / 8) * SIDE;
    if (sides > 2 || 2 * unit_bytes > WIDE_PANEL) s.panel = SIDE;
    configure((int)few_width(job->rows));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    unit before = {0}, now = unit_at(&s, first, 0, 0);
    for (int turn = 0; before.rows || now.rows; turn ^= 1) {
        if (now.rows && now.start == 0 && now.place == 0) begin_panel(&s, now.row);
        if (is_whole(&s, &now)) step(&s, &now, &before, s.tiles[turn], s.tiles[!turn], sides, 1);
        else step(&s, &now, &before, s.tiles[turn], s.tiles[!turn], sides, 0);
        if (before.rows && before.start + before.columns == w->d_in)
            for (int i = 0; i < sides; i++) {
                take_sums(sides * before.place + i, s.sums);
                write_sums(w, job, before.row, before.rows, i * SIDE, s.sums);
            }
        before = now;
        now = unit_after(&s, &now);
    }
    _tile_release();
}

/* `sides`, the number of tiles of x, as a compile-time constant. */
static void bf16_few(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    switch ((job->rows + SIDE - 1) / SIDE) {
    case 1: multiply_few(w, job, first, last, 1); break;
    case 2: multiply_few(w, job, first, last, 2); break;
    case 3: multiply_few(w, job, first, last, 3); break;
    default: multiply_few(w, job, first, last, 4);
    }
}
