/* float32 in lanes of AVX-512: what rows.h asks for of every dtype. */
#include <immintrin.h>

/* A load that the compiler folds into the expansion is microcoded on some processors: it goes to a register first. */
#define IN_REGISTER(vector) __asm__ volatile("" : "+v"(vector))

#define ACC __m512
#define ZERO() _mm512_setzero_ps()
#define PLUS(a, b) _mm512_add_ps(a, b)
#define SUM(acc) _mm512_reduce_add_ps(acc)
#define ROWS_OF_X 4

#define FLOATS __m512
#define FLANES 16
#define FLOAD(p) _mm512_loadu_ps(p)
#define FSTORE(p, a) _mm512_storeu_ps(p, a)
#define FSET(x) _mm512_set1_ps(x)
#define FADD(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#define FVECTORS 8

#define X float
#define LANES 16
#define VEC __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define MULTIPLY(acc, a, b) _mm512_fmadd_ps(a, b, acc)
