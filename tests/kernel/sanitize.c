/* Calls everything, on heap blocks of exactly the right size, for the sanitizers to watch:
 *     cc -O1 -g -fopenmp-simd -fsanitize=address,undefined -fno-sanitize-recover=all sanitize.c -o sanitize
 * and compares versions with each other and with a naive loop, in long double. */
#include <stdio.h>
#include <stdlib.h>

#include "../../tbhooks/kernel.c"

static uint64_t state = 88172645463325252u;

static uint64_t random_bits(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1du;
}

static double value(const char *data, int64_t i, int dtype) {
    return dtype == F32 ? read_f32(data, i) : dtype == F64 ? read_f64(data, i) : dtype == BF16 ? read_bf16(data, i) : read_f16(data, i);
}

static double element(const char *data, const char *minus, int64_t i, int dtype) {
    if (!minus) return value(data, i, dtype);
    return dtype == F64 ? value(data, i, F64) - value(minus, i, F64) : (float)value(data, i, dtype) - (float)value(minus, i, dtype);
}

static void fill(char *data, size_t bytes, int pattern) {
    static const unsigned char bytes_of[] = {0x00, 0x80, 0xff, 0x7f, 0x01, 0x7c};
    for (size_t i = 0; i < bytes; i++) {
        uint64_t r = random_bits();
        data[i] = (char)(pattern == 0 ? r >> 32 : pattern == 1 ? bytes_of[(r >> 32) % 6] : pattern == 2 ? 0 : 0x3c);
    }
}

static void fail(const char *what, int dtype, int64_t n, double a, double b) {
    fprintf(stderr, "%s differs: dtype %d n %lld: %.17g %.17g\n", what, dtype, (long long)n, a, b);
    exit(1);
}

static void check(Reduce *run, int difference, int64_t n, int dtype, int pattern, size_t shift) {
    const size_t width = dtype == F64 ? 8 : dtype == F32 ? 4 : 2, bytes = (size_t)n * width;
    char *block = malloc(bytes + shift + 1), *other = malloc(bytes + shift + 1); /* ends right after the data */
    double *row = malloc(WIDTH * sizeof *row);
    int32_t *counts = calloc(REJECTED + 1, sizeof *counts);
    char *data = block + shift + 1, *minus = difference ? other + shift + 1 : NULL;
    fill(data, bytes, pattern);
    if (minus) fill(minus, bytes, pattern);
    if (run(data, minus, n, dtype, row, counts)) fail("result", dtype, n, 1, 0);

    double nans = 0, infs = 0, zeros = 0, least = INFINITY, greatest = -INFINITY;
    long double sum = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = element(data, minus, i, dtype);
        nans += isnan(x) != 0, infs += isinf(x) != 0, zeros += x == 0;
        if (isfinite(x)) sum += x, least = fmin(least, x), greatest = fmax(greatest, x), largest = fmaxl(largest, fabsl(x));
    }
    const double finite = (double)n - nans - infs;
    long double mean = finite ? sum / finite : 0, spread = 0;
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = element(data, minus, i, dtype);
        if (isfinite(x)) spread += (x - mean) * (x - mean);
    }
    for (int i = 0; i <= REJECTED; i++) total += counts[i];
    if (row[COUNT] != (double)n || total != n) fail("count", dtype, n, row[COUNT], (double)total);
    if (row[NANS] != nans || counts[REJECTED] != nans + infs) fail("nans", dtype, n, row[NANS], nans);
    if (row[INFS] != infs) fail("infs", dtype, n, row[INFS], infs);
    if (row[ZEROS] != zeros) fail("zeros", dtype, n, row[ZEROS], zeros);
    if (row[MIN] != least) fail("min", dtype, n, row[MIN], least);
    if (row[MAX] != greatest) fail("max", dtype, n, row[MAX], greatest);
    if (!(fabsl(row[MEAN] - mean) <= 1e-12L * largest)) fail("mean", dtype, n, row[MEAN], (double)mean);
    const double m = (double)spread;
    if (isinf(m) ? !isinf(row[M2]) : !(fabs(row[M2] - m) <= 1e-9 * m + 1e-300 + 1e-29 * (double)(largest * largest) * (double)n)) fail("m2", dtype, n, row[M2], m);
    double again[WIDTH];
    if (run(data, minus, n, dtype, again, NULL) || memcmp(again, row, sizeof again)) fail("without counts", dtype, n, 0, 0);
    free(block), free(other), free(row), free(counts);
}

int main(void) {
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 255, 511, 512, 513, 1023, 2047, 2048, 2049, 4096, 6151, 20011};
    Reduce *runs[] = {version(), reduce_baseline,
#if defined(__x86_64__)
                      reduce_avx2, version() == reduce_avx512 ? reduce_avx512 : reduce_avx2
#endif
    };
    long done = 0;
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int dtype = F32; dtype <= F16; dtype++)
                for (int pattern = 0; pattern < 4; pattern++)
                    for (size_t shift = 0; shift < 9; shift += 7) /* data at 1 and at 8 past the alignment */
                        for (int difference = 0; difference < 2; difference++, done++)
                            check(runs[r], difference, sizes[s], dtype, pattern, shift);
    double row[WIDTH] = {7};
    float one = 1;
    if (tbhooks_reduce(&one, 1, 4, row, NULL) != -1 || tbhooks_reduce(&one, -1, 0, row, NULL) != -1 || row[0] != 7) fail("arguments", 0, 0, 0, 0);
    if (tbhooks_reduce(NULL, 0, 0, row, NULL) || tbhooks_reduce_difference(&one, &one, 1, 0, row, NULL) || row[ZEROS] != 1) fail("calls", 0, 0, 0, 0);
    printf("%ld cases passed\n", done);
}
