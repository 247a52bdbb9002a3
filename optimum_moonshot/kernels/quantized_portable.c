/* Quantized matrices on any CPU. */
#include "quantized.h"

/* Without branches, which random bits would mispredict. */
INLINE void expand_bytes(const int8_t *p, uint8_t bits, int8_t *to) {
    uint64_t codes;
    memcpy(&codes, p, 8);
    for (int i = 0; i < 8; i++) {
        const uint64_t bit = bits >> i & 1;
        to[i] = (int8_t)(codes & (0 - bit));
        codes >>= 8 * bit;
    }
}

INLINE int32_t dot_bytes(const int8_t *a, const int8_t *b) {
    int32_t sum = 0;
    for (int i = 0; i < WORD; i++) sum += a[i] * b[i];
    return sum;
}

#define EXPAND8(p, bits, to) expand_bytes(p, bits, to)
#include "quantized_bytes.h"

#define VECTOR_BYTES 16
#define IVEC int32_t
#define IBYTES WORD
#define IZERO() 0
#define IDOT(acc, a, b) ((acc) + dot_bytes(a, b))
#define ISUM4(a, b, c, d, to) (to[0] = a, to[1] = b, to[2] = c, to[3] = d)
#include "quantized_rows.h"

const quantized_kernel moonshot_quantized_portable = QUANTIZED_KERNEL;
