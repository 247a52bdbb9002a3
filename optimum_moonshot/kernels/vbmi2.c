/* x86-64 with AVX-512 VBMI2, which can expand 16-bit lanes. */
#include "kernels.h"

#if defined(__AVX512VBMI2__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__)
#include "bf16_lanes.h"
#include "rows.h"

#define NAME(x) f16_##x
#define T uint16_t
#define COLUMNS 32
#define RAW __m512i
#define EXPAND(p, m) expand_halves(p, m)
#define STORE(p, raw) _mm512_storeu_si512(p, raw)
#define STORE_WIDE(p, raw) (_mm512_storeu_ps(p, PART(raw, 0)), _mm512_storeu_ps((p) + 16, PART(raw, 1)))
#define X_OF float_of_f16
#define FLOAT_OF float_of_f16
#define Y_OF f16_of_float
#define PART(raw, k) _mm512_cvtph_ps((k) ? _mm512_extracti64x4_epi64(raw, 1) : _mm512_castsi512_si256(raw))
#define FLOATS_AT(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#include "rows.h"

/* float32 uses avx512.c. */
const kernels moonshot_vbmi2 = {KERNEL(bf16), KERNEL(f16)};
#else
const kernels moonshot_vbmi2; /* empty */
#endif
