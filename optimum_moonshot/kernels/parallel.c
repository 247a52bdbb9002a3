/* Threads: the OpenMP runtime that torch has loaded, since a second pool of threads would compete with its own. */
#include <stddef.h>

#include "parallel.h"

/* Null if torch has loaded none. A weak reference needs no library of its own, and no version of glibc, as dlsym does. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

#define TOGETHER 32 /* rows that the widest kernel unpacks together; parts begin at multiples of it, to leave no rest */

static int64_t bytes_before(const row_task *t, int64_t row) {
    const int64_t rows = row - t->first;
    const int64_t values = t->offsets ? t->offsets[row] - t->offsets[t->first] : rows * t->per_row;
    return values * t->value_bytes + rows * t->meta_bytes;
}

/* First row of a part. Parts have about equal bytes of values and bits, for equal load, as rows can differ in length. */
static int64_t part_start(const row_task *t, int64_t part) {
    if (part >= t->parts) return t->last;
    const int64_t before = bytes_before(t, t->last) / t->parts * part;
    int64_t low = t->first, high = t->last;
    while (low < high) {
        const int64_t row = low + (high - low) / 2;
        if (bytes_before(t, row) < before) low = row + 1;
        else high = row;
    }
    low = t->first + (low - t->first + TOGETHER - 1) / TOGETHER * TOGETHER;
    return low < t->last ? low : t->last;
}

static void work(void *argument) {
    row_task *t = argument;
    for (;;) {
        const int64_t part = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (part >= t->parts) return;
        const int64_t first = part_start(t, part), last = part_start(t, part + 1);
        if (first < last) t->process(t->context, first, last);
    }
}

#define PART_BYTES (64 << 10) /* small enough to balance the load between threads */
#define ALONE_BYTES (256 << 10) /* one thread processes less before others have started */

void moonshot_run(row_task *t, int threads, int64_t passes, int64_t least) {
    const int64_t rows = t->last - t->first;
    if (rows <= 0) return;
    const int64_t bytes = bytes_before(t, t->last);
    t->parts = 1;
    t->next = 0;
    if (threads > 1 && bytes * passes >= ALONE_BYTES && GOMP_parallel) {
        t->parts = bytes / PART_BYTES < 2 * threads ? 2 * threads : bytes / PART_BYTES;
        if (t->parts > 16 * threads) t->parts = 16 * threads;
        if (t->parts > rows / least) t->parts = rows / least < 2 * threads ? 2 * threads : rows / least;
        GOMP_parallel(work, t, (unsigned)threads, 0);
        return;
    }
    work(t);
}
