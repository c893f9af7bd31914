/* Products and fused steps of an encoder for CPUs with AVX-512, one thread each; native.py calls them. */

#include <math.h>
#include <stddef.h>

/* Whether this CPU runs what is here. */
int is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

/* e^x for x <= 0, to an ulp or two; a loop over it is made of vectors. */
static inline float power_f32(float x) {
    x = x < -87.0f ? -87.0f : x;
    /* Sums may be reordered in this file; a fused step may not. */
    float whole = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(whole, 2.12194440e-4f, __builtin_fmaf(whole, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    union { int i; float f; } two = {((int)whole + 127) << 23};
    return p * two.f;
}
static inline double power_f64(double x) { return exp(x); }
static inline float root_f32(float x) { return sqrtf(x); }
static inline double root_f64(double x) { return sqrt(x); }

#define REAL float
#define LANE int
#define N(name) name##_f32
#define V 16
#include "kernels.h"
#undef REAL
#undef LANE
#undef N
#undef V

#define REAL double
#define LANE long
#define N(name) name##_f64
#define V 8
#include "kernels.h"
