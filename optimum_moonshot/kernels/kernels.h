/* Products with a matrix in the packed format "bitmask": common definitions.
 *
 * W [d_out, d_in] consists of its stored values, row by row in the order of the inputs, and one bit per weight: bit j
 * (least significant first) of byte b of a row is 1 where input 8b+j has a value. A row has ceil(d_in/8) bytes. Row o
 * begins at value offsets[o], or at o * per_row if offsets is null. Files may be damaged, so the bits are not trusted:
 * nothing beyond `stored` values, d_out rows of bits and d_in inputs is read.
 */
#ifndef MOONSHOT_KERNELS_H
#define MOONSHOT_KERNELS_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bits are read as little-endian words"
#endif

enum { BF16, F16, F32, DTYPES };

typedef struct {
    const void *values;
    const uint8_t *meta;
    const int64_t *offsets; /* [d_out + 1], or null */
    int64_t per_row;        /* values of every row, if offsets is null */
    int64_t stored;         /* values of all rows */
    int64_t d_out, d_in;
} packed_matrix;

typedef struct {
    const void *x; /* the inputs as converted by `prepare` */
    int64_t rows;
    const void *bias; /* [d_out], or null */
    void *y;          /* [rows, d_out] */
} product;

/* The functions for one dtype. */
typedef struct {
    /* Dense rows first to last - 1, [last - first, d_in]. */
    void (*unpack)(const packed_matrix *w, int64_t first, int64_t last, void *dense);
    /* Outputs first to last - 1 for all rows of inputs. */
    void (*multiply)(const packed_matrix *w, const product *job, int64_t first, int64_t last);
    /* Convert inputs [rows, d_in] to the layout of `multiply`, in `prepared_bytes` of memory aligned to 64. */
    int64_t (*prepared_bytes)(int64_t rows, int64_t d_in);
    void (*prepare)(const void *x, int64_t rows, int64_t d_in, void *prepared);
    int64_t least; /* rows of inputs: for fewer, the kernel of the base instruction set is faster */
    /* Whether zeros of W are skipped for more than FEW rows. Skipping loses the NaN that a zero times infinity or NaN
     * gives, so inputs with such values are multiplied FEW rows at a time. */
    int skips;
} kernel;

/* The kernels of an instruction set by dtype; null if it has none, or if the compiler does not support it. */
typedef kernel kernels[DTYPES];

extern const kernels moonshot_portable, moonshot_avx2, moonshot_avx512, moonshot_vbmi2, moonshot_amx, moonshot_neon;

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int moonshot_product(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                            const uint8_t *meta, const int64_t *offsets, const void *x, int64_t rows,
                            const void *bias, void *y, int threads);

#define KERNEL(dtype) {dtype##_unpack, dtype##_multiply, dtype##_prepared_bytes, dtype##_prepare, 1, 1}

#define WORD 64 /* columns per word of bits */
#define WIDEST 4096 /* bytes of a row that are unpacked at a time: 4 rows fit the first-level cache */
#ifndef FEW
#define FEW 24 /* most rows of inputs for which W is unpacked; for more, only stored values are multiplied */
#endif
#define ROWS_OF_W 4 /* rows unpacked together, so that each vector of inputs is loaded once for all of them */
#define AT_ONCE 512 /* most rows of inputs of a product: more inputs and outputs would evict W from the caches */

#define SHARED 256 /* rows of W that use the same cached inputs, for many rows of inputs */
#define SOON 2 /* prefetch distance in rows of W */
#define LONG_SUM 1024 /* most inputs in a running sum: rounding errors grow with its length */

/* Prefetch distances in bytes for sequential reads, into the first-level cache (NEAR) and the second (FAR). */
#ifndef NEAR
#define NEAR 1024
#define NEAR_BITS 512
#define FAR 8192
#endif

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))

INLINE int64_t row_start(const packed_matrix *w, int64_t row) {
    return w->offsets ? w->offsets[row] : row * w->per_row;
}

/* The bits of up to 64 columns; bits beyond the row are cleared, and bytes beyond it are not read. */
INLINE uint64_t read_word(const uint8_t *meta, int64_t columns) {
    uint64_t word = 0;
    if (columns >= WORD) {
        memcpy(&word, meta, 8);
        return word;
    }
    for (int64_t byte = 0; 8 * byte < columns; byte++) word |= (uint64_t)meta[byte] << (8 * byte);
    return word & ((1ull << columns) - 1);
}

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of_bf16(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

/* Round to nearest, ties to even, as torch does. */
INLINE uint16_t bf16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)
#include <immintrin.h>
INLINE float float_of_f16(uint16_t bits) { return _cvtsh_ss(bits); }
INLINE uint16_t f16_of_float(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
INLINE float float_of_f16(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
}
INLINE uint16_t f16_of_float(float value) {
    __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
#else
INLINE float float_of_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
    float small = (float)rest * 0x1p-24f; /* denormal */
    return float_of_bits(sign | bits_of_float(small));
}
INLINE uint16_t f16_of_float(float value) {
    uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* denormal: adding 0.5 rounds at the last place of a denormal half */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13));
}
#endif

#endif
