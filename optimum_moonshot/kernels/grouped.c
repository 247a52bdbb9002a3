/* Products of groups of inputs with a group's matrix each, such as the tokens of the experts of a mixture. */
#include "kernels.h"

/* W is the stack of `groups` matrices of d_out / groups rows. The first counts[0] rows of x are multiplied by the first,
 * the next counts[1] by the second, and so on; y [sum of counts, d_out / groups]. Returns as moonshot_product. */
PUBLIC int moonshot_grouped(int dtype, int64_t d_out, int64_t d_in, const void *values, int64_t stored,
                            const uint8_t *meta, const int64_t *offsets, int64_t groups, const int64_t *counts,
                            const void *x, void *y, int threads) {
    const int64_t bytes = dtype == F32 ? 4 : 2, size = d_out / groups, width = (d_in + 7) / 8;
    const int64_t regular = offsets ? 0 : stored / groups; /* offsets count from the first value of W */
    for (int64_t group = 0, first = 0; group < groups; first += counts[group++]) {
        if (!counts[group]) continue;
        const char *own = (const char *)values + group * regular * bytes;
        const char *inputs = (const char *)x + first * d_in * bytes;
        char *outputs = (char *)y + first * size * bytes;
        const int failed = moonshot_product(dtype, size, d_in, own, offsets ? stored : regular,
                                            meta + group * size * width, offsets ? offsets + group * size : 0, inputs,
                                            counts[group], 0, outputs, threads);
        if (failed) return failed;
    }
    return 0;
}
