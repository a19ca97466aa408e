/* For tests: each version by name, whatever the CPU would have been given. */
#include "../../../../tbhooks/reduction/kernel.c"

#define EXPORT(name)                                                                                             \
    int test_##name(const void *data, const void *minus, int64_t n, int64_t dtype, double *row, int32_t *counts) { \
        const Job job = {data, minus, NULL, n, dtype, row, counts};                                              \
        if (!is_sound(&job)) return -1;                                                                          \
        start_row(row);                                                                                          \
        reduce_in_turn(&job, 1, reduce_##name);                                                                  \
        return 0;                                                                                                \
    }

EXPORT(baseline)
#if defined(__x86_64__)
EXPORT(avx2)
EXPORT(avx512)
#endif
