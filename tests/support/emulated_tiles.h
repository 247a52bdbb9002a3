/* AMX tiles of bytes in plain C, in place of the instructions, for CPUs without them: all tiles have 16 rows of 64
 * bytes, as `configure` must have set. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1

static _Thread_local int8_t emulated[8][16][64];
static _Thread_local int configured;

static inline void _tile_loadconfig(const void *p) {
    const uint8_t *all = p;
    for (int tile = 0; tile < 8; tile++)
        if (all[0] != 1 || all[16 + 2 * tile] != 64 || all[17 + 2 * tile] || all[48 + tile] != 16) abort();
    configured = 1;
}

static inline void _tile_release(void) { configured = 0; }

static inline void _tile_zero(int tile) {
    if (!configured) abort();
    memset(emulated[tile], 0, 1024);
}

static inline void _tile_loadd(int tile, const void *p, int64_t stride) {
    if (!configured) abort();
    for (int row = 0; row < 16; row++) memcpy(emulated[tile][row], (const char *)p + row * stride, 64);
}

static inline void _tile_stored(int tile, void *p, int64_t stride) {
    if (!configured) abort();
    for (int row = 0; row < 16; row++) memcpy((char *)p + row * stride, emulated[tile][row], 64);
}

/* Row m of `a`, and for column n 4 bytes of each row k of `b`. */
static inline void _tile_dpbssd(int sums, int a, int b) {
    if (!configured) abort();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            int32_t sum;
            memcpy(&sum, &emulated[sums][m][4 * n], 4);
            for (int k = 0; k < 64; k++) sum += emulated[a][m][k] * emulated[b][k / 4][4 * n + k % 4];
            memcpy(&emulated[sums][m][4 * n], &sum, 4);
        }
}
