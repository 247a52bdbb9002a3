/* The interface for Python: selection of the instruction set, threads, and products and unpacking of whole matrices. */
#define _GNU_SOURCE
#include <stdlib.h>
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "parallel.h"
#include "quantized.h"
#include "tables.h"

shuffles moonshot_shuffles __attribute__((aligned(64)));

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux saves the large state of AMX tiles only for processes that request it. */
static int may_use_tiles(void) {
#if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

/* Bits for avx2, avx512, vbmi2, amx, and 8-bit products with AVX-512 and with AMX: supported by the CPU, and saved by the operating system at context switches. */
static int supported_sets(void) {
    unsigned a, b, c, d, b7, c7, d7, a71 = 0, sets = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned base = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA, OSXSAVE, AVX, F16C */
    if ((c & base) != base || (enabled_state() & 6) != 6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
    if ((b7 & (1u << 3 | 1u << 5)) != (1u << 3 | 1u << 5)) return 0; /* BMI, AVX2 */
    sets = 1;
    const unsigned wide = 1u << 16 | 1u << 30 | 1u << 31; /* AVX-512 F, BW, VL */
    if ((b7 & wide) != wide || (enabled_state() & 0xe6) != 0xe6) return (int)sets;
    sets |= 2;
    if (a >= 1) {
        unsigned b1, c1, d1;
        __get_cpuid_count(7, 1, &a71, &b1, &c1, &d1);
    }
    if (!(c7 & 1u << 6)) return (int)sets; /* VBMI2 */
    sets |= 4;
    if ((c7 & (1u << 1 | 1u << 11)) == (1u << 1 | 1u << 11)) sets |= 16; /* VBMI, VNNI */
    const unsigned tiles = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE; and AVX-512 BF16 */
    if ((a71 & 1u << 5) && (d7 & tiles) == tiles && (enabled_state() & 0x60000) == 0x60000 && may_use_tiles())
        sets |= d7 & 1u << 25 ? 8 | 32 : 8; /* AMX-INT8 */
    return (int)sets;
}
#elif defined(__aarch64__)
/* Whether the CPU has dot products of bytes. */
static int supported_sets(void) {
#if defined(__linux__)
    enum { DOT_PRODUCTS = 1 << 20 };
    return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
#else
    return 1; /* all of Apple's */
#endif
}
#endif

/* From slowest to fastest; each uses the kernels of its base for dtypes that it does not implement. */
static const struct instruction_set {
    const char *name;
    const kernels *table;
    const struct instruction_set *base;
    int needs, many; /* many: only for several rows of inputs */
    const quantized_kernel *quantized; /* null, or unsupported: that of the next slower set */
    int quantized_needs;
} sets[] = {
    {"portable", &moonshot_portable, NULL, 0, 0, &moonshot_quantized_portable, 0},
#if defined(__x86_64__)
    {"avx2", &moonshot_avx2, &sets[0], 1, 0, &moonshot_quantized_avx2, 1},
    {"avx512", &moonshot_avx512, &sets[0], 2, 0, NULL, 0},
    {"vbmi2", &moonshot_vbmi2, &sets[2], 4, 0, &moonshot_quantized_vnni, 16},
    {"amx", &moonshot_amx, &sets[3], 8, 1, &moonshot_quantized_amx, 48},
#elif defined(__aarch64__)
    {"neon", &moonshot_neon, &sets[0], 0, 0, &moonshot_quantized_neon, 1},
#endif
};
enum { SETS = sizeof sets / sizeof *sets };

static kernels one_row, many_rows;

static int supports(int needs) {
    int detected = 0;
#if defined(__x86_64__) || defined(__aarch64__)
    detected = supported_sets();
#endif
    return (needs & detected) == needs;
}

static int usable(int set) { return supports(sets[set].needs) && (*sets[set].table)[BF16].multiply; }

static const quantized_kernel *quantized_of(int set) {
    for (; set > 0; set--)
        if (sets[set].quantized && sets[set].quantized->multiply && supports(sets[set].quantized_needs)) break;
    return sets[set].quantized;
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

/* Version of the interface; Python rejects libraries of another release. */
PUBLIC int moonshot_version(void) { return 6; }

/* Name of one of the instruction sets that this CPU supports, counted from the slowest; null beyond the last. */
PUBLIC const char *moonshot_set_name(int which) {
    for (int set = 0; set < SETS; set++)
        if (usable(set) && which-- == 0) return sets[set].name;
    return NULL;
}

/* Switch to an instruction set by name, null for the fastest. Returns 0, or -1 if the CPU does not support it. */
PUBLIC int moonshot_use(const char *name) {
    for (int set = SETS - 1; set >= 0; set--) {
        if ((name && strcmp(name, sets[set].name)) || !usable(set)) continue;
        for (int dtype = 0; dtype < DTYPES; dtype++) {
            const struct instruction_set *many = &sets[set], *one;
            while (!(*many->table)[dtype].multiply) many = many->base;
            for (one = many; one->many;) one = one->base;
            while (!(*one->table)[dtype].multiply) one = one->base;
            many_rows[dtype] = (*many->table)[dtype];
            one_row[dtype] = (*one->table)[dtype];
        }
        moonshot_quantized = quantized_of(set);
        fill_shuffles();
        return 0;
    }
    return -1;
}

typedef struct {
    const packed_matrix *w;
    const kernel *with;
    const product *job; /* the product to compute; null to unpack into `dense` */
    void *dense;
    int64_t first; /* row of W that is unpacked first */
    int bytes;
} task;

static void process(const void *context, int64_t first, int64_t last) {
    const task *t = context;
    if (t->job) t->with->multiply(t->w, t->job, first, last);
    else t->with->unpack(t->w, first, last, (char *)t->dense + (first - t->first) * t->w->d_in * t->bytes);
}

static void run(const task *t, int64_t last, int threads) {
    const packed_matrix *w = t->w;
    const int64_t passes = t->job ? (t->job->rows + 3) / 4 : 2, least = t->job && t->job->rows > 1 ? SHARED : 1;
    row_task rows = {process, t, w->offsets, w->per_row, t->bytes, (w->d_in + 7) / 8, t->first, last, 0, 0};
    moonshot_run(&rows, threads, passes, least);
}

static int all_finite(const void *x, int64_t count, int dtype) {
    static const uint32_t exponents[] = {[BF16] = 0x7f80, [F16] = 0x7c00, [F32] = 0x7f800000};
    const uint32_t exponent = exponents[dtype];
    int special = 0;
    if (dtype == F32)
        for (int64_t i = 0; i < count; i++) special |= (((const uint32_t *)x)[i] & exponent) == exponent;
    else
        for (int64_t i = 0; i < count; i++) special |= (((const uint16_t *)x)[i] & exponent) == exponent;
    return !special;
}

/* y [rows, d_out] = x [rows, d_in] W^T + bias, all of one dtype. Returns 0, or -1 if out of memory. */
int moonshot_product(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored, const uint8_t *meta,
                     const int64_t *offsets, const void *x, int64_t rows, const void *bias, void *y, int threads) {
    const packed_matrix w = {values, meta, offsets, d_out ? stored / d_out : 0, stored, d_out, d_in};
    const int bytes = dtype == F32 ? 4 : 2;
    void *prepared = NULL;
    for (int64_t first = 0, count; first < rows && d_out > 0; first += count) {
        count = rows - first < AT_ONCE ? rows - first : AT_ONCE;
        const kernel *with = count < many_rows[dtype].least ? &one_row[dtype] : &many_rows[dtype];
        const void *inputs = (const char *)x + first * d_in * bytes;
        if (count > FEW && with->skips && !all_finite(inputs, count * d_in, dtype)) count = FEW;
        if (posix_memalign(&prepared, 64, (size_t)with->prepared_bytes(count, d_in))) return -1;
        with->prepare(inputs, count, d_in, prepared);
        const product job = {prepared, count, bias, (char *)y + first * d_out * bytes};
        const task t = {&w, with, &job, NULL, 0, bytes};
        run(&t, d_out, threads);
        free(prepared);
    }
    return 0;
}

/* Dense rows first to last - 1 of W, [last - first, d_in]. */
PUBLIC void moonshot_unpack(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                            const uint8_t *meta, const int64_t *offsets, int64_t first, int64_t last, void *dense,
                            int threads) {
    const packed_matrix w = {values, meta, offsets, d_out ? stored / d_out : 0, stored, d_out, d_in};
    const task t = {&w, &one_row[dtype], NULL, dense, first, dtype == F32 ? 4 : 2};
    run(&t, last, threads);
}

/* offsets [d_out + 1]: the number of values in all rows before each row. */
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
