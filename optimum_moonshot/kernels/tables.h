/* Shuffles that expand the values of 4 or 8 columns, by their bits. Byte shuffles write 0 for an index of 255. */
#ifndef MOONSHOT_TABLES_H
#define MOONSHOT_TABLES_H

#include <stdint.h>

typedef struct {
    uint8_t halves[256][16]; /* bytes of 8 columns of 16 bits */
    uint8_t floats[16][16];  /* bytes of 4 columns of 32 bits */
    int8_t places[256][8];   /* values of 8 columns; -1 where a column has none */
} shuffles;

extern shuffles moonshot_shuffles; /* filled by moonshot_use */

#endif
