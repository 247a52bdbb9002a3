/* Unpacking and products for one dtype and instruction set: a template, included once for each combination.
 *
 * Three algorithms, by rows of inputs: `vectors` (1 or 2) multiplies each value where it is expanded; `several` (up to
 * FEW) unpacks rows of W to a buffer in the first-level cache and multiplies them with all inputs; `many` (more)
 * multiplies each stored value with a vector of inputs, so that zeros cost nothing.
 *
 * The including file defines for the dtype:
 *   NAME(x)             adds a prefix to a name
 *   T                   the integer type of the bits of a value
 *   COLUMNS             values that a step expands: divides 64
 *   RAW, EXPAND(p, m)   a vector of COLUMNS values; expand the values at p to the positions of 1 in m, with 0 elsewhere
 *   STORE(p, raw)       store it in a dense matrix
 *   STORE_WIDE(p, raw), X_OF(bits)     store it as X; convert a value to X
 *   FLOAT_OF(bits), Y_OF(float)        convert a bias to float, and a float to an output
 *   PART(raw, k)        the k-th vector of LANES, in the order of STORE_WIDE
 *   PLACE(column)       position of a column in the order of STORE_WIDE, within 64 columns; the identity by default
 *   FLOATS_AT(p)        the values at p as a vector of floats
 *
 * and for all dtypes:
 *   X                   type of the factors in products
 *   LANES               length of a vector of X: divides COLUMNS
 *   VEC, LOAD(p)        a vector of X
 *   ACC, ZERO(), SUM(acc)              a vector of float32 sums; the sum of its lanes
 *   MULTIPLY(acc, a, b), PLUS(a, b)    acc + a * b; the sum of two vectors
 *   ROWS_OF_X           rows of inputs that are multiplied together
 *   FLOATS, FLANES      a vector of float32 and its length
 *   FLOAD(p), FSTORE(p, a), FSET(x), FADD(acc, a, b)  load; store; broadcast; acc + a * b
 *   FVECTORS            number of sums in registers; two sets of them unless all are in use
 *   TURN(r)             transpose FLANES vectors; optional
 */

#ifndef PLACE
#define PLACE(column) (column)
#endif

#define PRAGMA_UNROLL _Pragma("GCC unroll 16")
#define STEPS (WORD / COLUMNS)
#define PARTS (COLUMNS / LANES)
#define STRIP (WIDEST / (int64_t)sizeof(X)) /* a multiple of 64 */
#define STEP_BITS ((COLUMNS == 64) ? ~0ull : (1ull << (COLUMNS % 64)) - 1)

/* EXPAND always reads COLUMNS values. Near `end`, read a copy padded with zeros instead, to stay inside the tensor. */
static __attribute__((noinline)) void NAME(copy)(T *copy, const T *p, const T *end) {
    int64_t left = end - p;
    for (int64_t i = 0; i < COLUMNS; i++) copy[i] = i < left ? p[i] : 0;
}

INLINE RAW NAME(careful)(const T *p, uint64_t bits, const T *end) {
    T last[COLUMNS];
    if (end - p >= COLUMNS) return EXPAND(p, bits);
    NAME(copy)(last, p, end);
    return EXPAND(last, bits);
}

/* Prefetch for sequential reads: half of the values of two words, as for 50% sparsity, and their bits. Values are
 * fetched twice, far ahead and near: hardware prefetchers stop at page boundaries, and the far fetch hides the TLB
 * miss. Prefetching an invalid address is harmless. */
#define FETCH_IN_ORDER(p, bits)                                                                                        \
    do {                                                                                                               \
        PRAGMA_UNROLL for (size_t line = 0; line < WORD * sizeof *(p); line += 64) {                                   \
            __builtin_prefetch((const char *)(p) + NEAR + line);                                                       \
            __builtin_prefetch((const char *)(p) + FAR + line, 0, 2);                                                  \
        }                                                                                                              \
        __builtin_prefetch((const char *)(bits) + NEAR_BITS);                                                          \
    } while (0)
#define FETCH_NOTHING(p, bits) (void)0

/* Call ACTION(raw, column, step) for every step of `columns` columns, starting at p and the first bit of meta, and
 * FETCH(p, bits) for every two words; p advances by the values read. The fast loop handles two words at a time, fully
 * unrolled, so that shifts are constants; it needs COLUMNS values of slack before `end`, since EXPAND reads ahead. */
#define EACH_STEP(p, end, meta, columns, FETCH, ACTION)                                                                \
    do {                                                                                                               \
        int64_t column = 0;                                                                                            \
        if ((end) - (p) >= (columns) + COLUMNS) {                                                                      \
            for (; column + 2 * WORD <= (columns); column += 2 * WORD) {                                               \
                const uint64_t pair[2] = {read_word((meta) + column / 8, WORD), read_word((meta) + column / 8 + 8, WORD)}; \
                FETCH(p, (meta) + column / 8);                                                                         \
                PRAGMA_UNROLL for (int step = 0; step < 2 * STEPS; step++) {                                           \
                    uint64_t bits = (pair[step / STEPS] >> (step % STEPS * COLUMNS)) & STEP_BITS;                                            \
                    RAW raw = EXPAND(p, bits);                                                                         \
                    p += __builtin_popcountll(bits);                                                                   \
                    ACTION(raw, column + step * COLUMNS, step);                                                        \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (; column < (columns); column += WORD) {                                                                   \
            uint64_t word = read_word((meta) + column / 8, (columns) - column);                                        \
            for (int step = 0; step < STEPS; step++) {                                                                 \
                uint64_t bits = (word >> (step * COLUMNS)) & STEP_BITS;                                                \
                RAW raw = NAME(careful)(p, bits, end);                                                                 \
                p += __builtin_popcountll(bits);                                                                       \
                ACTION(raw, column + step * COLUMNS, step & 3);                                                        \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

__attribute__((unused)) static void NAME(unpack)(const packed_matrix *w, int64_t first, int64_t last, void *dense) {
    const int64_t d_in = w->d_in, bytes = (d_in + 7) / 8;
    const T *values = w->values, *end = values + w->stored;
    T *out = dense;
    for (int64_t row = first; row < last; row++, out += d_in) {
        const T *p = values + row_start(w, row);
        const uint8_t *meta = w->meta + row * bytes;
        int64_t whole = d_in - d_in % WORD;
#define KEEP(raw, column, step) STORE(out + (column), raw)
        EACH_STEP(p, end, meta, whole, FETCH_IN_ORDER, KEEP);
#undef KEEP
        if (whole < d_in) {
            T rest[WORD];
            const uint8_t *bits = meta + whole / 8;
#define KEEP(raw, column, step) STORE(rest + (column), raw)
            EACH_STEP(p, end, bits, d_in - whole, FETCH_IN_ORDER, KEEP);
#undef KEEP
            memcpy(out + whole, rest, (size_t)(d_in - whole) * sizeof(T));
        }
    }
}

/* Many rows of inputs are split into as few chunks as registers allow, of about equal size: an uneven split would leave
 * a small chunk with poor use of the registers. Returns the size of the first chunk, in whole vectors. */
INLINE int64_t NAME(chunk)(int64_t rows) {
    const int64_t vectors = (rows + FLANES - 1) / FLANES, chunks = (vectors + FVECTORS - 1) / FVECTORS;
    return (vectors + chunks - 1) / chunks * FLANES;
}

/* Transpose up to FLANES rows, `stride` apart, of up to FLANES columns to rows of FLANES, padded with zeros. */
INLINE void NAME(turn_square)(const T *in, int64_t stride, int64_t rows, int64_t columns, float *out, int64_t width) {
#ifdef TURN
    if (rows == FLANES && columns == FLANES) {
        FLOATS r[FLANES];
        PRAGMA_UNROLL for (int i = 0; i < FLANES; i++) r[i] = FLOATS_AT(in + i * stride);
        TURN(r);
        PRAGMA_UNROLL for (int i = 0; i < FLANES; i++) FSTORE(out + i * width, r[i]);
        return;
    }
#endif
    for (int64_t i = 0; i < columns; i++) {
        for (int64_t row = 0; row < rows; row++) out[i * width + row] = FLOAT_OF(in[row * stride + i]);
        for (int64_t row = rows; row < FLANES; row++) out[i * width + row] = 0;
    }
}

/* Transpose a chunk of inputs to [d_in, width] floats, so that a stored value multiplies contiguous vectors. */
static void NAME(turn)(const T *in, int64_t rows, int64_t d_in, float *out, int64_t width) {
    for (int64_t start = 0; start < d_in; start += WORD) { /* output of a block stays in the first-level cache */
        const int64_t last = d_in - start < WORD ? d_in : start + WORD;
        for (int64_t row = 0; row < width; row += FLANES)
            for (int64_t i = start; i < last; i += FLANES)
                NAME(turn_square)(in + row * d_in + i, d_in, rows - row < FLANES ? rows - row : FLANES,
                                  last - i < FLANES ? last - i : FLANES, out + i * width + row, width);
    }
}

/* Length of a padded row: whole words, and one more, so that rows with power-of-2 lengths use different cache sets. */
INLINE int64_t NAME(stride)(int64_t d_in) { return (d_in + 2 * WORD - 1) / WORD * WORD; }

__attribute__((unused)) static int64_t NAME(prepared_bytes)(int64_t rows, int64_t d_in) {
    if (rows > FEW) return (rows + FLANES - 1) / FLANES * FLANES * d_in * (int64_t)sizeof(float);
    return rows * NAME(stride)(d_in) * (int64_t)sizeof(X);
}

/* Copy rows of inputs, padded, for `vectors` and `several`. */
static void NAME(pad)(const T *in, int64_t rows, int64_t d_in, X *to) {
    const int64_t stride = NAME(stride)(d_in);
    for (int64_t row = 0; row < rows; row++) {
        X *out = to + row * stride;
        memset(out + d_in / WORD * WORD, 0, (size_t)(stride - d_in / WORD * WORD) * sizeof(X));
        for (int64_t i = 0; i < d_in; i++) out[PLACE(i)] = X_OF(in[row * d_in + i]);
    }
}

__attribute__((unused)) static void NAME(prepare)(const void *x, int64_t rows, int64_t d_in, void *prepared) {
    if (rows <= FEW) {
        NAME(pad)(x, rows, d_in, prepared);
        return;
    }
    for (int64_t row = 0, width; row < rows; row += width) {
        width = NAME(chunk)(rows - row);
        NAME(turn)((const T *)x + row * d_in, rows - row < width ? rows - row : width, d_in,
                   (float *)prepared + row * d_in, width);
    }
}

INLINE void NAME(finish)(const packed_matrix *w, const product *job, int64_t x_row, int64_t row, float sum) {
    const T *bias = job->bias;
    if (bias) sum += FLOAT_OF(bias[row]);
    ((T *)job->y)[x_row * w->d_out + row] = Y_OF(sum);
}

/* One or two rows of inputs: multiply values in registers, as they are expanded. Four independent sums per row hide the
 * latency of the multiply-adds. */
INLINE void NAME(vectors)(const packed_matrix *w, const product *job, int64_t first, int64_t last, const int rows) {
    const int64_t d_in = w->d_in, bytes = (d_in + 7) / 8, stride = NAME(stride)(d_in);
    const T *values = w->values, *end = values + w->stored;
    const X *x = job->x;
    for (int64_t row = first; row < last; row++) {
        const T *p = values + row_start(w, row);
        const uint8_t *meta = w->meta + row * bytes;
        ACC sums[2][4] = {{ZERO(), ZERO(), ZERO(), ZERO()}, {ZERO(), ZERO(), ZERO(), ZERO()}};
#define ADD(raw, column, step)                                                                                         \
    PRAGMA_UNROLL for (int k = 0; k < PARTS; k++)                                                                      \
        PRAGMA_UNROLL for (int j = 0; j < rows; j++)                                                                   \
            sums[j][((step) * PARTS + k) & 3] = MULTIPLY(sums[j][((step) * PARTS + k) & 3], PART(raw, k),              \
                                                         LOAD(x + j * stride + (column) + k * LANES))
        EACH_STEP(p, end, meta, d_in, FETCH_IN_ORDER, ADD);
#undef ADD
        PRAGMA_UNROLL for (int j = 0; j < rows; j++)
            NAME(finish)(w, job, j, row, SUM(PLUS(PLUS(sums[j][0], sums[j][1]), PLUS(sums[j][2], sums[j][3]))));
    }
}

/* sums[i][j] += dot product of row i of an unpacked strip and row j of x, for `count` rows of x: a register tile. */
INLINE void NAME(tile)(const X *strip, int64_t strip_stride, const X *x, int64_t stride, int64_t columns, ACC *sums,
                       int64_t sums_stride, const int count) {
    ACC acc[ROWS_OF_W][ROWS_OF_X];
    PRAGMA_UNROLL for (int i = 0; i < ROWS_OF_W; i++)
        PRAGMA_UNROLL for (int j = 0; j < count; j++) acc[i][j] = sums[i * sums_stride + j];
    for (int64_t c = 0; c < columns; c += LANES) {
        VEC b[ROWS_OF_X];
        PRAGMA_UNROLL for (int j = 0; j < count; j++) b[j] = LOAD(x + j * stride + c);
        PRAGMA_UNROLL for (int i = 0; i < ROWS_OF_W; i++) {
            VEC a = LOAD(strip + i * strip_stride + c);
            PRAGMA_UNROLL for (int j = 0; j < count; j++) acc[i][j] = MULTIPLY(acc[i][j], a, b[j]);
        }
    }
    PRAGMA_UNROLL for (int i = 0; i < ROWS_OF_W; i++)
        PRAGMA_UNROLL for (int j = 0; j < count; j++) sums[i * sums_stride + j] = acc[i][j];
}

#define MOST FEW /* rows of x with sums */

static void NAME(tiles)(const X *strip, int64_t strip_stride, const X *x, int64_t stride, int64_t rows,
                        int64_t columns, ACC *sums) {
    int64_t j = 0;
    for (; j + ROWS_OF_X <= rows; j += ROWS_OF_X)
        NAME(tile)(strip, strip_stride, x + j * stride, stride, columns, sums + j, MOST, ROWS_OF_X);
    for (; j + 2 <= rows; j += 2) NAME(tile)(strip, strip_stride, x + j * stride, stride, columns, sums + j, MOST, 2);
    for (; j < rows; j++) NAME(tile)(strip, strip_stride, x + j * stride, stride, columns, sums + j, MOST, 1);
}

/* Up to FEW rows of inputs: unpack strips of ROWS_OF_W rows of W and multiply them with all rows of inputs. */
static void NAME(several)(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    const int64_t d_in = w->d_in, bytes = (d_in + 7) / 8, stride = NAME(stride)(d_in), rows = job->rows;
    const T *values = w->values, *end = values + w->stored;
    const X *x = job->x;
    /* A cache line more than a page, so that the rows use different cache sets. */
    enum { STRIDE = WIDEST / sizeof(X) + 64 / sizeof(X) };
    const int64_t usual = w->stored / w->d_out * STRIP / d_in; /* mean values of a strip */
    X strip[ROWS_OF_W * STRIDE] __attribute__((aligned(64)));
    ACC sums[ROWS_OF_W * MOST];
    for (int64_t row = first; row < last; row += ROWS_OF_W) {
        const int64_t here = last - row < ROWS_OF_W ? last - row : ROWS_OF_W;
        const T *p[ROWS_OF_W];
        for (int64_t i = 0; i < here; i++) p[i] = values + row_start(w, row + i);
        for (int i = 0; i < ROWS_OF_W * MOST; i++) sums[i] = ZERO();
        if (here < ROWS_OF_W) memset(strip, 0, sizeof strip);
        for (int64_t start = 0; start < d_in; start += STRIP) {
            const int64_t columns = d_in - start < STRIP ? d_in - start : STRIP;
            const int64_t padded = (columns + WORD - 1) / WORD * WORD;
            for (int64_t i = 0; i < here; i++) {
                const uint8_t *meta = w->meta + (row + i) * bytes + start / 8;
                X *out = strip + i * STRIDE;
                int64_t ahead = usual * (int64_t)sizeof(T), ahead_bits = STRIP / 8;
                if (start + columns >= d_in && row + i + ROWS_OF_W < w->d_out) { /* the first strip of the next rows */
                    ahead = (const char *)(values + row_start(w, row + i + ROWS_OF_W)) - (const char *)p[i];
                    ahead_bits = ROWS_OF_W * bytes - start / 8;
                }
#define FETCH(p, bits)                                                                                                 \
    do {                                                                                                               \
        __builtin_prefetch((const char *)(p) + ahead);                                                                 \
        __builtin_prefetch((const char *)(p) + ahead + 64);                                                            \
        __builtin_prefetch((const char *)(bits) + ahead_bits);                                                         \
    } while (0)
#define KEEP(raw, column, step) STORE_WIDE(out + (column), raw)
                EACH_STEP(p[i], end, meta, columns, FETCH, KEEP);
#undef KEEP
#undef FETCH
            }
            NAME(tiles)(strip, STRIDE, x + start, stride, rows, padded, sums);
        }
        for (int64_t i = 0; i < here; i++)
            for (int64_t j = 0; j < rows; j++) NAME(finish)(w, job, j, row + i, SUM(sums[i * MOST + j]));
    }
}

/* `count` values at p as floats, with 0 from `end` on. */
INLINE const float *NAME(floats)(const T *p, int64_t count, const T *end, float *buffer) {
    const int64_t left = end - p;
    if (left >= count && sizeof(T) == sizeof(float)) return (const float *)p;
    int64_t i = 0;
    for (; i < count && i + FLANES <= left; i += FLANES) FSTORE(buffer + i, FLOATS_AT(p + i));
    for (; i < count; i++) buffer[i] = i < left ? FLOAT_OF(p[i]) : 0;
    return buffer;
}

/* Words of bits per block of inputs, such that a block of all rows of a chunk fits the first-level cache. */
#define WORDS_OF(vectors) ((vectors) * FLANES > 64 ? 1 : 2)

/* sums [vectors * FLANES] += values at the set bits times their inputs [WORDS_OF * 64, vectors * FLANES]. The sums stay
 * in registers, hence `vectors` is a compile-time constant. */
INLINE void NAME(add_bits)(const uint64_t *words, const float *values, const float *x, float *sums, const int vectors) {
    /* With few vectors, the latency of additions would dominate: alternate values then use a second set of sums. */
    const int sets = vectors == FVECTORS ? 1 : 2;
    FLOATS acc[2][FVECTORS];
    PRAGMA_UNROLL for (int j = 0; j < vectors; j++) acc[0][j] = FLOAD(sums + j * FLANES);
    if (sets > 1) PRAGMA_UNROLL for (int j = 0; j < vectors; j++) acc[1][j] = FSET(0);
    for (int word = 0; word < WORDS_OF(vectors); word++, x += WORD * vectors * FLANES) {
        uint64_t bits = words[word];
        for (int times = __builtin_popcountll(bits) / sets; times; times--)
            PRAGMA_UNROLL for (int set = 0; set < sets; set++, bits &= bits - 1) {
                const float *inputs = x + __builtin_ctzll(bits) * vectors * FLANES;
                const FLOATS value = FSET(*values);
                values++;
                PRAGMA_UNROLL for (int j = 0; j < vectors; j++)
                    acc[set][j] = FADD(acc[set][j], value, FLOAD(inputs + j * FLANES));
            }
        if (sets > 1 && bits) {
            const float *inputs = x + __builtin_ctzll(bits) * vectors * FLANES;
            const FLOATS value = FSET(*values);
            values++;
            PRAGMA_UNROLL for (int j = 0; j < vectors; j++)
                acc[0][j] = FADD(acc[0][j], value, FLOAD(inputs + j * FLANES));
        }
    }
    PRAGMA_UNROLL for (int j = 0; j < vectors; j++) {
        if (sets > 1) acc[0][j] = FADD(acc[0][j], acc[1][j], FSET(1));
        FSTORE(sums + j * FLANES, acc[0][j]);
    }
}

/* Transpose up to FLANES rows of sums to columns of rows of SHARED. */
INLINE void NAME(turn_sums)(const float *sums, int64_t width, int64_t rows, float *turned) {
#ifdef TURN
    if (rows >= FLANES) {
        FLOATS r[FLANES];
        PRAGMA_UNROLL for (int i = 0; i < FLANES; i++) r[i] = FLOAD(sums + i * width);
        TURN(r);
        PRAGMA_UNROLL for (int i = 0; i < FLANES; i++) FSTORE(turned + i * SHARED, r[i]);
        return;
    }
#endif
    for (int64_t i = 0; i < FLANES; i++)
        for (int64_t row = 0; row < rows && row < FLANES; row++) turned[i * SHARED + row] = sums[row * width + i];
}

/* Write the outputs of up to SHARED rows of W and a chunk of inputs from sums [rows of W, width], transposed first so
 * that stores are contiguous. */
INLINE void NAME(finish_chunk)(const packed_matrix *w, const product *job, int64_t first, int64_t last, int64_t x_row,
                               const float *sums, int64_t width) {
    float turned[FLANES * SHARED] __attribute__((aligned(64)));
    for (int64_t j = 0; j < width && x_row + j < job->rows; j += FLANES) {
        for (int64_t row = 0; row < last - first; row += FLANES)
            NAME(turn_sums)(sums + row * width + j, width, last - first - row, turned + row);
        for (int64_t k = 0; k < FLANES && x_row + j + k < job->rows; k++) {
            const float *from = turned + k * SHARED;
            T *y = (T *)job->y + (x_row + j + k) * w->d_out + first;
            const T *bias = (const T *)job->bias;
            if (bias)
                for (int64_t i = 0; i < last - first; i++) y[i] = Y_OF(from[i] + FLOAT_OF(bias[first + i]));
            else
                for (int64_t i = 0; i < last - first; i++) y[i] = Y_OF(from[i]);
        }
    }
}

/* Add partial sums to the total and reset them: blocked summation has smaller rounding errors than one long sum. */
INLINE void NAME(collect)(float *sums, float *all, int64_t count) {
    for (int64_t i = 0; i < count; i += FLANES) {
        FSTORE(all + i, FADD(FLOAD(all + i), FLOAD(sums + i), FSET(1)));
        FSTORE(sums + i, FSET(0));
    }
}

/* Multiply the stored values of up to SHARED rows of W with a chunk of inputs, block by block of inputs: the block
 * stays in the first-level cache for all rows. */
INLINE void NAME(group)(const packed_matrix *w, const product *job, int64_t first, int64_t last, int64_t x_row,
                        const int vectors) {
    const int64_t d_in = w->d_in, bytes = (d_in + 7) / 8, width = vectors * FLANES, columns = WORDS_OF(vectors) * WORD;
    const int64_t x_ahead = (columns * width * 4 / 64 + last - first - 1) / (last - first) * 64;
    const int64_t ahead = (int64_t)sizeof(T) * columns * w->stored / w->d_out / d_in + 32; /* mean bytes of a block */
    const T *end = (const T *)w->values + w->stored, *p[SHARED + SOON];
    const float *x = (const float *)job->x + x_row * d_in;
    float sums[SHARED * FVECTORS * FLANES] __attribute__((aligned(64))), buffer[2 * WORD + FLANES];
    float all[SHARED * FVECTORS * FLANES] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)((last - first) * width) * sizeof *sums);
    memset(all, 0, (size_t)((last - first) * width) * sizeof *all);
    for (int64_t row = first; row < last; row++) p[row - first] = (const T *)w->values + row_start(w, row);
    for (int i = 0; i < SOON; i++) p[last - first + i] = p[0];
    for (int64_t start = 0; start < d_in; start += columns) {
        const char *next_x = (const char *)(x + (start + columns) * width);
        for (int64_t row = first; row < last; row++) {
            const uint8_t *meta = w->meta + row * bytes + start / 8;
            const int second = WORDS_OF(vectors) > 1 && d_in - start > WORD;
            const uint64_t words[2] = {read_word(meta, d_in - start),
                                       second ? read_word(meta + 8, d_in - start - WORD) : 0};
            const int64_t count = __builtin_popcountll(words[0]) + __builtin_popcountll(words[1]);
            const T *here = p[row - first];
            float *to = sums + (row - first) * width;
            const float *values = NAME(floats)(here, count, end, buffer);
            p[row - first] = here + count;
            /* Prefetch the next block of this row, the rows below, and a fraction of the next block of inputs. */
            __builtin_prefetch(meta + 64, 0, 2);
            __builtin_prefetch(meta + SOON * bytes);
            for (int64_t line = 0; line < ahead; line += 64) {
                __builtin_prefetch((const char *)(here + count) + line, 0, 2);
                __builtin_prefetch((const char *)p[row - first + SOON] + line);
            }
            for (int64_t line = 0; line < x_ahead; line += 64) __builtin_prefetch(next_x + line, 0, 2);
            next_x += x_ahead;
            NAME(add_bits)(words, values, x + start * width, to, vectors);
        }
        if ((start + columns) % LONG_SUM == 0 || start + columns >= d_in) NAME(collect)(sums, all, (last - first) * width);
    }
    NAME(finish_chunk)(w, job, first, last, x_row, all, width);
}

static void NAME(many)(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    for (int64_t x_row = 0, width; x_row < job->rows; x_row += width) {
        width = NAME(chunk)(job->rows - x_row);
        const int64_t together = width > 64 ? SHARED : SHARED / 4; /* few sums then fit the first-level cache */
        for (int64_t row = first, next; row < last; row = next) {
            next = last - row < together ? last : row + together;
            switch (width / FLANES) {
            case 1: NAME(group)(w, job, row, next, x_row, 1); break;
            case 2: NAME(group)(w, job, row, next, x_row, 2); break;
            case 3: NAME(group)(w, job, row, next, x_row, 3); break;
            case 4: NAME(group)(w, job, row, next, x_row, 4); break;
            case 5: NAME(group)(w, job, row, next, x_row, 5); break;
            case 6: NAME(group)(w, job, row, next, x_row, 6); break;
            case 7: NAME(group)(w, job, row, next, x_row, 7); break;
            default: NAME(group)(w, job, row, next, x_row, FVECTORS);
            }
        }
    }
}

__attribute__((unused)) static void NAME(multiply)(const packed_matrix *w, const product *job, int64_t first, int64_t last) {
    if (job->rows == 1) {
        NAME(vectors)(w, job, first, last, 1);
        return;
    }
    if (job->rows == 2) {
        NAME(vectors)(w, job, first, last, 2);
        return;
    }
    if (job->rows > FEW) {
        NAME(many)(w, job, first, last);
        return;
    }
    NAME(several)(w, job, first, last);
}

#ifndef KEEP_STEPS
#undef NAME
#undef T
#undef COLUMNS
#undef RAW
#undef EXPAND
#undef STORE
#undef STORE_WIDE
#undef X_OF
#undef Y_OF
#undef FLOAT_OF
#undef PART
#undef FLOATS_AT
#undef PLACE
#undef MOST
#undef WORDS_OF
#undef STRIP
#undef STEPS
#undef PARTS
#undef STEP_BITS
#undef PRAGMA_UNROLL
#endif
