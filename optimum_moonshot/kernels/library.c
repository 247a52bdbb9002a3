/* What Python calls: the choice of instructions, the threads, and the products and unpacking of whole matrices. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "kernels.h"
#include "tables.h"

#define PUBLIC __attribute__((visibility("default")))

shuffles moonshot_shuffles __attribute__((aligned(64)));

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* 1 for avx2, 3 with avx512, 7 with vbmi2: what the processor has and the system saves at a switch. */
static int found_sets(void) {
    unsigned a, b, c, d, b7, c7, a71 = 0, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned base = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA, OSXSAVE, AVX, F16C */
    if ((c & base) != base || (enabled_state() & 6) != 6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return 0;
    if (!(b7 & 1u << 5)) return 0; /* AVX2 */
    found = 1;
    const unsigned wide = 1u << 16 | 1u << 30 | 1u << 31; /* AVX-512 F, BW, VL */
    if ((b7 & wide) != wide || (enabled_state() & 0xe6) != 0xe6) return (int)found;
    found |= 2;
    if (a >= 1) {
        unsigned b1, c1, d1;
        __get_cpuid_count(7, 1, &a71, &b1, &c1, &d1);
    }
    if ((c7 & 1u << 6) && (a71 & 1u << 5)) found |= 4; /* VBMI2, BF16 */
    return (int)found;
}
#endif

/* From the slowest to the fastest. */
static const struct {
    const char *name;
    const kernels *own, *base; /* base has what own lacks */
    int needs;
} sets[] = {
    {"portable", &moonshot_portable, &moonshot_portable, 0},
#if defined(__x86_64__)
    {"avx2", &moonshot_avx2, &moonshot_portable, 1},
    {"avx512", &moonshot_avx512, &moonshot_portable, 2},
    {"vbmi2", &moonshot_vbmi2, &moonshot_avx512, 4},
#elif defined(__aarch64__)
    {"neon", &moonshot_neon, &moonshot_portable, 0},
#endif
};
enum { SETS = sizeof sets / sizeof *sets };

static kernels chosen;

static int usable(int set) {
    int found = 0;
#if defined(__x86_64__)
    found = found_sets();
#endif
    return (sets[set].needs & found) == sets[set].needs && sets[set].own->product[0];
}

static void fill_shuffles(void) {
    for (int bits = 0; bits < 256; bits++)
        for (int column = 0, rank = 0; column < 8; column++) {
            const int has = bits >> column & 1;
            moonshot_shuffles.places[bits][column] = (int8_t)(has ? rank : -1);
            for (int byte = 0; byte < 2; byte++)
                moonshot_shuffles.halves[bits][2 * column + byte] = (uint8_t)(has ? 2 * rank + byte : 255);
            for (int byte = 0; byte < 4 && bits < 16 && column < 4; byte++)
                moonshot_shuffles.floats[bits][4 * column + byte] = (uint8_t)(has ? 4 * rank + byte : 255);
            rank += has;
        }
}

/* What the functions take; a library of another release is not used. */
PUBLIC int moonshot_version(void) { return 1; }

/* The name of an instruction set that this processor has, from the slowest on; null beyond the last. */
PUBLIC const char *moonshot_set_name(int which) {
    for (int set = 0; set < SETS; set++)
        if (usable(set) && which-- == 0) return sets[set].name;
    return NULL;
}

/* Use the instruction set of a name from now on, null for the fastest: 0, or -1 where the processor lacks it. */
PUBLIC int moonshot_use(const char *name) {
    for (int set = SETS - 1; set >= 0; set--) {
        if ((name && strcmp(name, sets[set].name)) || !usable(set)) continue;
        kernels all = *sets[set].own;
        for (int dtype = 0; dtype < DTYPES; dtype++)
            if (!all.product[dtype]) {
                const kernels *base = sets[set].base;
                all.unpack[dtype] = base->unpack[dtype];
                all.widen[dtype] = base->widen[dtype];
                all.wide_bytes[dtype] = base->wide_bytes[dtype];
                all.product[dtype] = base->product[dtype];
            }
        fill_shuffles();
        chosen = all;
        return 0;
    }
    return -1;
}

/* Threads: those of the OpenMP that torch brings and keeps, so that no second pool competes with it. */
typedef void (*parallel_region)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    const packed_matrix *w;
    const product *job;
    void *dense;
    int64_t first, last, parts, next;
    int dtype, bytes;
} task;

/* The first row of a part: parts hold equally many bytes of values and bits. */
static int64_t part_start(const task *t, int64_t part) {
    const packed_matrix *w = t->w;
    const int64_t meta = (w->d_in + 7) / 8, rows = t->last - t->first;
    if (part >= t->parts) return t->last;
    int64_t row = t->first + rows * part / t->parts;
    if (w->offsets) {
        const int64_t *offsets = w->offsets, origin = offsets[t->first];
        const int64_t all = (offsets[t->last] - origin) * t->bytes + rows * meta;
        int64_t low = t->first, high = t->last;
        while (low < high) {
            row = low + (high - low) / 2;
            const int64_t before = (offsets[row] - origin) * t->bytes + (row - t->first) * meta;
            if (before < all / t->parts * part) low = row + 1;
            else high = row;
        }
        row = low;
    }
    row = t->first + (row - t->first + ROWS_OF_W - 1) / ROWS_OF_W * ROWS_OF_W;
    return row < t->last ? row : t->last;
}

static void work(void *argument) {
    task *t = argument;
    for (;;) {
        const int64_t part = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (part >= t->parts) return;
        const int64_t first = part_start(t, part), last = part_start(t, part + 1);
        if (first >= last) continue;
        if (t->job) chosen.product[t->dtype](t->w, t->job, first, last);
        else
            chosen.unpack[t->dtype](t->w, first, last,
                                    (char *)t->dense + (first - t->first) * t->w->d_in * t->bytes);
    }
}

#define PART_BYTES (64 << 10)
#define ALONE_BYTES (256 << 10) /* less than this is done before other threads are awake */

static void run(task *t, int threads) {
    static parallel_region parallel;
    const packed_matrix *w = t->w;
    const int64_t rows = t->last - t->first;
    if (rows <= 0) return;
    const int64_t values = row_start(w, t->last) - row_start(w, t->first);
    const int64_t bytes = values * t->bytes + rows * ((w->d_in + 7) / 8);
    const int64_t load = bytes * (t->job ? (t->job->rows + 3) / 4 : 2);
    t->parts = 1;
    t->next = 0;
    if (threads > 1 && load >= ALONE_BYTES) {
        if (!parallel) parallel = (parallel_region)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        if (parallel) {
            t->parts = bytes / PART_BYTES < 2 * threads ? 2 * threads : bytes / PART_BYTES;
            if (t->parts > 16 * threads) t->parts = 16 * threads;
            parallel(work, t, (unsigned)threads, 0);
            return;
        }
    }
    work(t);
}

/* y [rows, d_out] = x [rows, d_in] W^T + bias, all of one dtype; 0, or -1 without memory for the inputs. */
PUBLIC int moonshot_product(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                            const uint8_t *meta, const int64_t *offsets, const void *x, int64_t rows,
                            const void *bias, void *y, int threads) {
    const packed_matrix w = {values, meta, offsets, d_out ? stored / d_out : 0, stored, d_out, d_in};
    const int bytes = dtype == F32 ? 4 : 2, wide = chosen.wide_bytes[dtype];
    const int64_t padded = (d_in + WORD - 1) / WORD * WORD;
    const int64_t stride = padded + WORD; /* rows do not begin at the same place of a page */
    void *copy = NULL;
    if (rows <= 0 || d_out <= 0) return 0;
    if (posix_memalign(&copy, 64, (size_t)(rows * stride * wide))) return -1;
    for (int64_t row = 0; row < rows; row++)
        chosen.widen[dtype]((const char *)x + row * d_in * bytes, d_in, padded, (char *)copy + row * stride * wide);
    const product job = {copy, stride, rows, bias, y};
    task t = {&w, &job, NULL, 0, d_out, 1, 0, dtype, bytes};
    run(&t, threads);
    free(copy);
    return 0;
}

/* Dense rows first to last - 1 of W, [last - first, d_in]. */
PUBLIC void moonshot_unpack(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                            const uint8_t *meta, const int64_t *offsets, int64_t first, int64_t last, void *dense,
                            int threads) {
    const packed_matrix w = {values, meta, offsets, d_out ? stored / d_out : 0, stored, d_out, d_in};
    task t = {&w, NULL, dense, first, last, 1, 0, dtype, dtype == F32 ? 4 : 2};
    run(&t, threads);
}

/* offsets [d_out + 1]: how many values the rows before have. */
PUBLIC void moonshot_offsets(int64_t d_out, int64_t d_in, const uint8_t *meta, int64_t *offsets) {
    const int64_t bytes = (d_in + 7) / 8;
    int64_t total = 0;
    for (int64_t row = 0; row < d_out; row++, meta += bytes) {
        offsets[row] = total;
        for (int64_t column = 0; column < d_in; column += WORD)
            total += __builtin_popcountll(read_word(meta + column / 8, d_in - column));
    }
    offsets[d_out] = total;
}
