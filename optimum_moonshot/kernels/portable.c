/* Any CPU, with the vector extensions of GCC and Clang. */
#include "kernels.h"

typedef float floats __attribute__((vector_size(16), aligned(4), may_alias));

INLINE floats load_floats(const float *p) { return *(const floats *)p; }

INLINE float sum_floats(floats a) {
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* Values at p where bits are 1, else 0; without branches, which random bits would mispredict. */
#define EXPANSION(name, type)                                                                                          \
    typedef struct {                                                                                                   \
        type column[4];                                                                                                \
    } name;                                                                                                            \
    INLINE name expand_##name(const type *p, uint64_t bits) {                                                          \
        name raw;                                                                                                      \
        for (int i = 0, rank = 0; i < 4; i++) {                                                                        \
            const type bit = (bits >> i) & 1;                                                                          \
            raw.column[i] = p[rank] & (type)(0 - bit);                                                                 \
            rank += (int)bit;                                                                                          \
        }                                                                                                              \
        return raw;                                                                                                    \
    }

EXPANSION(halves, uint16_t)
EXPANSION(words, uint32_t)

INLINE floats floats_of_bf16(halves raw) {
    return (floats){float_of_bf16(raw.column[0]), float_of_bf16(raw.column[1]), float_of_bf16(raw.column[2]),
                    float_of_bf16(raw.column[3])};
}

INLINE floats floats_of_f16(halves raw) {
    return (floats){float_of_f16(raw.column[0]), float_of_f16(raw.column[1]), float_of_f16(raw.column[2]),
                    float_of_f16(raw.column[3])};
}

INLINE floats floats_of_words(words raw) {
    floats wide;
    memcpy(&wide, &raw, sizeof wide);
    return wide;
}

#define FLOATS floats
#define FLANES 4
#define FLOAD(p) load_floats(p)
#define FSTORE(p, a) (*(floats *)(p) = (a))
#define FSET(x) ((floats){x, x, x, x})
#define FADD(acc, a, b) ((acc) + (a) * (b))
#define FVECTORS 8

#define X float
#define LANES 4
#define VEC floats
#define LOAD(p) load_floats(p)
#define ACC floats
#define ZERO() ((floats){0})
#define PLUS(a, b) ((a) + (b))
#define SUM(acc) sum_floats(acc)
#define MULTIPLY(acc, a, b) ((acc) + (a) * (b))
#define ROWS_OF_X 2

#define NAME(x) bf16_##x
#define T uint16_t
#define COLUMNS 4
#define RAW halves
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) memcpy(p, &(raw), sizeof(raw))
#define STORE_WIDE(p, raw) (*(floats *)(p) = floats_of_bf16(raw))
#define X_OF float_of_bf16
#define FLOAT_OF float_of_bf16
#define Y_OF bf16_of_float
#define PART(raw, k) floats_of_bf16(raw)
#define FLOATS_AT(p) floats_of_bf16(*(const halves *)(p))
#include "rows.h"

#define NAME(x) f16_##x
#define T uint16_t
#define COLUMNS 4
#define RAW halves
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) memcpy(p, &(raw), sizeof(raw))
#define STORE_WIDE(p, raw) (*(floats *)(p) = floats_of_f16(raw))
#define X_OF float_of_f16
#define FLOAT_OF float_of_f16
#define Y_OF f16_of_float
#define PART(raw, k) floats_of_f16(raw)
#define FLOATS_AT(p) floats_of_f16(*(const halves *)(p))
#include "rows.h"

#define NAME(x) f32_##x
#define T uint32_t
#define COLUMNS 4
#define RAW words
#define EXPAND(p, m) expand_words(p, m)
#define STORE(p, raw) memcpy(p, &(raw), sizeof(raw))
#define STORE_WIDE(p, raw) (*(floats *)(p) = floats_of_words(raw))
#define X_OF float_of_bits
#define FLOAT_OF float_of_bits
#define Y_OF bits_of_float
#define PART(raw, k) floats_of_words(raw)
#define FLOATS_AT(p) load_floats((const float *)(p))
#include "rows.h"

const kernels moonshot_portable = {KERNEL(bf16), KERNEL(f16), KERNEL(f32)};
