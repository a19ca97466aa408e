/* Calls everything, on heap blocks of exactly the right size, for the sanitizers to watch:
 *     cc -O1 -g -fopenmp-simd -fsanitize=address,undefined -fno-sanitize-recover=all sanitize.c -o sanitize
 * and compares versions with each other and with a naive loop, in long double. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../../../tbhooks/reduction/kernel.c"

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

/* Threads of its own, in place of the OpenMP library's. */
static void *call(void *both) {
    void **parts = both;
    ((void (*)(void *))parts[0])(parts[1]);
    return NULL;
}

static void run_in_threads(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t others[64];
    void *parts[] = {(void *)function, data};
    (void)flags;
    for (unsigned i = 1; i < threads; i++) pthread_create(&others[i], NULL, call, parts);
    function(data);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
}

/* Many arrays at once, each copied: the same in one thread and in several, to the bit. */
static void check_threads(int dtype) {
    enum { JOBS = 40, LONGEST = 200000 };
    const size_t width = (size_t)WIDTHS[dtype];
    static double rows[3][JOBS][WIDTH];
    static int32_t counts[3][JOBS][REJECTED + 1];
    memset(counts, 0, sizeof counts);
    char *data[JOBS], *copies[JOBS];
    Job jobs[JOBS];
    for (int j = 0; j < JOBS; j++) {
        const int64_t n = j % 3 ? (int64_t)(random_bits() >> 33) % 700 : (int64_t)(random_bits() >> 33) % LONGEST;
        data[j] = malloc((size_t)n * width), copies[j] = malloc((size_t)n * width);
        fill(data[j], (size_t)n * width, j % 4);
        jobs[j] = (Job){data[j], NULL, copies[j], n, dtype, NULL, NULL};
    }
    for (int r = 0; r < 3; r++) {
        for (int j = 0; j < JOBS; j++) jobs[j].row = rows[r][j], jobs[j].counts = counts[r][j];
        tbhooks_use(r ? run_in_threads : NULL);
        if (tbhooks_reduce_all(jobs, JOBS, r == 2 ? 7 : 2)) fail("result", dtype, r, 1, 0);
        if (memcmp(rows[r], rows[0], sizeof rows[0])) fail("rows in threads", dtype, r, 0, 0);
        if (memcmp(counts[r], counts[0], sizeof counts[0])) fail("counts in threads", dtype, r, 0, 0);
    }
    for (int j = 0; j < JOBS; j++) {
        double alone[WIDTH];
        if (memcmp(data[j], copies[j], (size_t)jobs[j].size * width)) fail("copy", dtype, jobs[j].size, 0, 0);
        if (tbhooks_reduce(data[j], jobs[j].size, dtype, alone, NULL, 1) || memcmp(alone, rows[0][j], sizeof alone)) fail("alone", dtype, j, 0, 0);
        free(data[j]), free(copies[j]);
    }
    tbhooks_use(NULL);
}

static void check_alive(int dtype) {
    const size_t width = (size_t)WIDTHS[dtype];
    for (int round = 0; round < 200; round++) {
        const int64_t outer = 1 + round % 5, units = 1 + round % 7, inner = 1 + (int64_t)(random_bits() >> 40) % 150;
        char *data = calloc((size_t)(outer * units * inner), width);
        float *alive = calloc((size_t)units, sizeof *alive);
        const int64_t at = (int64_t)(random_bits() >> 33) % (outer * units * inner), minus_zero = round % 3 == 0;
        memset(data + (size_t)at * width + (minus_zero ? width - 1 : 0), minus_zero ? 0x80 : 1, 1);
        if (tbhooks_find_alive(data, dtype, outer, units, inner, alive)) fail("alive", dtype, round, 1, 0);
        for (int64_t u = 0; u < units; u++)
            if (alive[u] != (float)(!minus_zero && at / inner % units == u)) fail("alive", dtype, u, (double)alive[u], 0);
        free(data), free(alive);
    }
}

static void check(Reduce *version_run, int difference, int64_t n, int dtype, int pattern, size_t shift) {
    const size_t width = dtype == F64 ? 8 : dtype == F32 ? 4 : 2, bytes = (size_t)n * width;
    char *block = malloc(bytes + shift + 1), *other = malloc(bytes + shift + 1); /* ends right after the data */
    double *row = malloc(WIDTH * sizeof *row);
    int32_t *counts = calloc(REJECTED + 1, sizeof *counts);
    char *data = block + shift + 1, *minus = difference ? other + shift + 1 : NULL;
    fill(data, bytes, pattern);
    if (minus) fill(minus, bytes, pattern);
    Job job = {data, minus, NULL, n, dtype, row, counts};
    start_row(row);
    reduce_in_turn(&job, 1, version_run);

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
    job.row = again, job.counts = NULL;
    start_row(again);
    reduce_in_turn(&job, 1, version_run);
    if (memcmp(again, row, sizeof again)) fail("without counts", dtype, n, 0, 0);
    free(block), free(other), free(row), free(counts);
}

int main(void) {
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 255, 511, 512, 513, 1023, 2047, 2048, 2049, 4096, 6151, 20011, SLICE + 5};
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
                        for (int difference = 0; difference < 2 && (sizes[s] < SLICE || pattern + shift == 0); difference++, done++)
                            check(runs[r], difference, sizes[s], dtype, pattern, shift);
    double row[WIDTH] = {7};
    float one = 1;
    for (int dtype = F32; dtype <= F16; dtype++) check_threads(dtype), check_alive(dtype);
    if (tbhooks_reduce(&one, 1, 4, row, NULL, 1) != -1 || tbhooks_reduce(&one, -1, 0, row, NULL, 1) != -1 || row[0] != 7) fail("arguments", 0, 0, 0, 0);
    if (tbhooks_find_alive((char *)&one, 4, 1, 1, 1, &one) != -1) fail("arguments", 0, 0, 0, 0);
    if (tbhooks_reduce(NULL, 0, 0, row, NULL, 1) || row[COUNT] != 0) fail("calls", 0, 0, 0, 0);
    printf("%ld cases passed\n", done);
}
