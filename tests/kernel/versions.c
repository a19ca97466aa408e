/* For tests: each version by name, whatever the CPU would have been given. */
#include "../../tbhooks/kernel.c"

#define EXPORT(name)                                                                                             \
    int test_##name(const void *data, const void *minus, int64_t n, int dtype, double *row, int32_t *counts) {   \
        return reduce_##name(data, minus, n, dtype, row, counts);                                                \
    }

EXPORT(baseline)
#if defined(__x86_64__)
EXPORT(avx2)
EXPORT(avx512)
#endif
