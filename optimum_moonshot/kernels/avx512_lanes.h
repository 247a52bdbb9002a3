/* float32 in AVX-512 registers: the definitions for rows.h that all dtypes share. */
#include "avx512.h"

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
#define TURN(r) transpose((__m512i *)(r))

#define X float
#define LANES 16
#define VEC __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define MULTIPLY(acc, a, b) _mm512_fmadd_ps(a, b, acc)
