/* Work on rows of a packed matrix, divided between threads. */
#ifndef MOONSHOT_PARALLEL_H
#define MOONSHOT_PARALLEL_H

#include <stdint.h>

typedef struct {
    void (*process)(const void *context, int64_t first, int64_t last); /* rows first to last - 1 */
    const void *context;
    const int64_t *offsets; /* values before each row, or null if all rows have per_row */
    int64_t per_row, value_bytes, meta_bytes; /* bytes of a value, and of the bits of a row */
    int64_t first, last;                      /* the rows to process */
    int64_t parts, next;                      /* set by `moonshot_run` */
} row_task;

/* Process all rows. `passes` is the work on each byte of W, in units of reading it; parts have at least `least` rows,
 * if that leaves two for each thread. */
void moonshot_run(row_task *task, int threads, int64_t passes, int64_t least);

#endif
