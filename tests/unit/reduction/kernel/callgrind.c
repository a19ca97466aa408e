/* For tests: one reduction of a million numbers, for callgrind to count its instructions. */
#include <stdio.h>
#include <stdlib.h>

#include "../../../../tbhooks/reduction/kernel.c"

/* Through a pointer: a call that the compiler inlines is none that callgrind could find by its name. */
static int (*volatile reduce_array)(const void *, int64_t, int64_t, double *, int32_t *, int64_t) = tbhooks_reduce;

int main(int argc, char **argv) {
    const int dtype = argc > 1 ? atoi(argv[1]) : F32, with_buckets = argc > 2 && atoi(argv[2]);
    const int64_t n = 1 << 20;
    char *x = aligned_alloc(64, 8 * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const float value = (float)rand() / 1e9f - 1.07f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (dtype == F32) ((float *)x)[i] = value;
        else if (dtype == F64) ((double *)x)[i] = value;
        else ((uint16_t *)x)[i] = (uint16_t)(dtype == BF16 ? bits >> 16 : 0x3c00 | (bits & 0x83ff));
    }
    double row[WIDTH];
    int32_t counts[REJECTED + 1] = {0};
    reduce_array(x, n, dtype, row, with_buckets ? counts : NULL, 1);
    printf("%g\n", row[MEAN]);
    free(x);
    return 0;
}
