/* Codes of a block without instructions that expand: first the codes as signed bytes, then 8 columns at a time. The
 * including file defines EXPAND8(p, bits, to), which moves up to 8 bytes at p to the columns with a bit; optionally
 * SPREAD4(p, to), which stores 64 codes of 4 bits as signed bytes. */

INLINE uint64_t load_word(const uint8_t *p, int bytes) {
    uint64_t word = 0;
    memcpy(&word, p, (size_t)bytes);
    return word;
}

/* Turn 8 bytes of c + zero into bytes of c, without a borrow from the next byte. */
INLINE void store_signed(uint64_t codes, uint64_t zero, int8_t *to) {
    const uint64_t ones = 0x0101010101010101, tops = 0x8080808080808080;
    codes = zero == 128 ? codes ^ tops : ((codes | tops) - zero * ones) ^ tops;
    memcpy(to, &codes, 8);
}

#ifndef SPREAD4
INLINE void spread4(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < 8; i++) {
        uint64_t codes = load_word(p + 4 * i, 4);
        codes = (codes | codes << 16) & 0x0000ffff0000ffff;
        codes = (codes | codes << 8) & 0x00ff00ff00ff00ff;
        codes = (codes | codes << 4) & 0x0f0f0f0f0f0f0f0f;
        store_signed(codes, 8, to + 8 * i);
    }
}
#define SPREAD4(p, to) spread4(p, to)
#endif

INLINE void spread3(const uint8_t *p, int8_t *to) {
    for (int i = 0; i < 8; i++) {
        uint64_t codes = load_word(p + 3 * i, 3);
        codes = (codes | codes << 20) & 0x00000fff00000fff;
        codes = (codes | codes << 10) & 0x003f003f003f003f;
        codes = (codes | codes << 5) & 0x0707070707070707;
        store_signed(codes, 4, to + 8 * i);
    }
}

INLINE void spread(const uint8_t *p, const int bits, int8_t *to) {
    if (bits == 8) for (int i = 0; i < WORD; i += 8) store_signed(load_word(p + i, 8), 128, to + i);
    else if (bits == 4) SPREAD4(p, to);
    else spread3(p, to);
}

INLINE void expand_block(const uint8_t *p, uint64_t word, const int bits, const int dense, int8_t *to) {
    int8_t codes[WORD + 8];
    if (dense) {
        spread(p, bits, to);
        return;
    }
    spread(p, bits, codes);
    memset(codes + WORD, 0, 8); /* EXPAND8 reads beyond the last code */
    /* The number of survivors in each byte, then before each byte. */
    uint64_t ranks = word - ((word >> 1) & 0x5555555555555555);
    ranks = (ranks & 0x3333333333333333) + ((ranks >> 2) & 0x3333333333333333);
    ranks = (ranks + (ranks >> 4)) & 0x0f0f0f0f0f0f0f0f;
    ranks = (ranks * 0x0101010101010101) << 8;
    for (int i = 0; i < WORD; i += 8) EXPAND8(codes + (uint8_t)(ranks >> i), (uint8_t)(word >> i), to + i);
}
#define EXPAND(p, word, bits, dense, to) expand_block(p, word, bits, dense, to)
