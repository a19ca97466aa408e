/* One read of an array of floating point numbers gives the nine columns of its row (stats.py) and, if
 * asked, its half-octave bucket counts (buckets.py). C11 with a plain C ABI, one thread, no state.
 *
 *     cc -O3 -fopenmp-simd -fPIC -shared kernel.c -o _kernel.so
 *
 * -fopenmp-simd needs no runtime and starts no threads: it only lets the marked loops add up in several
 * lanes. Without it the results are as good, but slow.
 *
 * The array is read in blocks that stay in the L1 cache while several loops go over them. What is not an
 * aligned array of float or double (halves, differences) is first written to a small buffer.
 */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { F32, F64, BF16, F16 };
enum { COUNT, MEAN, M2, MIN, MAX, ZEROS, NANS, INFS, BASE, WIDTH };
enum { HALF_OCTAVES = 192, MIDDLE = HALF_OCTAVES, REJECTED = 2 * HALF_OCTAVES + 1 };

/* A key is a float's sign, exponent and top mantissa bit. Those without a sign: below LOWEST, 2**-64, is
 * the middle bucket; the last two are infinity and NaN. */
enum { KEYS = 1024, SIGN = 512, LOWEST = 2 * (127 - 64), NOT_FINITE = 2 * 255 };

/* FEW: up to there one table is enough. STRIDE: were tables 4096 bytes apart, a load would have to wait
 * for the store to the same key of another table, because the CPU compares low address bits first. */
enum { BLOCK = 2048, FEW = 512, TABLES = 8, STRIDE = KEYS + 16 };

#define INLINE static inline __attribute__((always_inline))

/* A block of n elements; sum and squares are of the deviations from a pivot. A NaN or an infinity makes
 * `squares` NaN or infinite: that is the whole test for them. */
typedef struct {
    double sum, squares, least, greatest, zeros;
} Scan;

#define SCAN(real, zeros_t)                                                                                      \
    INLINE Scan scan_##real(const real *x, int n, double pivot) {                                                \
        double sum = 0, squares = 0;                                                                             \
        real least = x[0], greatest = x[0];                                                                      \
        zeros_t zeros = 0; /* as wide as an element, so that its lanes match */                                  \
        _Pragma("omp simd reduction(+ : sum, squares, zeros) reduction(min : least) reduction(max : greatest)")  \
        for (int i = 0; i < n; i++) {                                                                            \
            double away = (double)x[i] - pivot;                                                                  \
            sum += away;                                                                                         \
            squares += away * away;                                                                              \
            least = x[i] < least ? x[i] : least;                                                                 \
            greatest = x[i] > greatest ? x[i] : greatest;                                                        \
            zeros += x[i] == 0;                                                                                  \
        }                                                                                                        \
        return (Scan){sum, squares, (double)least, (double)greatest, (double)zeros};                             \
    }

SCAN(float, int32_t)
SCAN(double, int64_t)

/* Subtracting zero from every element is a tenth of the work: a loop of its own is compiled without. */
#define ZERO_APART(name, scan)                                                                                   \
    static Scan name(const float *x, int n, double pivot) {                                                      \
        return pivot == 0 ? scan(x, n, 0) : scan(x, n, pivot);                                                   \
    }

ZERO_APART(scan_baseline, scan_float)

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

/* With a third fewer instructions than the compiler finds: each half is widened straight from memory,
 * and zeros are counted under a mask. */
AVX512 INLINE Scan scan_intrinsics(const float *x, int n, double pivot) {
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX), one = _mm512_set1_epi32(1);
    __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, squares[2] = {sum[0], sum[0]};
    __m512 least = _mm512_set1_ps(INFINITY), greatest = _mm512_set1_ps(-INFINITY);
    __m512i zeros = _mm512_setzero_si512();
    const int even = n / 16 * 16;
    for (int i = 0; i < even; i += 16) {
        __m512 both = _mm512_loadu_ps(x + i);
        least = _mm512_min_ps(least, both);
        greatest = _mm512_max_ps(greatest, both);
        __mmask16 zero = _mm512_testn_epi32_mask(_mm512_castps_si512(both), magnitude);
        zeros = _mm512_mask_add_epi32(zeros, zero, zeros, one);
        for (int half = 0; half < 2; half++) {
            __m512d away = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * half)) - _mm512_set1_pd(pivot);
            sum[half] += away;
            squares[half] = _mm512_fmadd_pd(away, away, squares[half]);
        }
    }
    Scan scan = {_mm512_reduce_add_pd(sum[0] + sum[1]), _mm512_reduce_add_pd(squares[0] + squares[1]),
                 (double)_mm512_reduce_min_ps(least), (double)_mm512_reduce_max_ps(greatest),
                 _mm512_reduce_add_epi32(zeros)};
    for (int i = even; i < n; i++) {
        const double value = (double)x[i], away = value - pivot;
        scan.sum += away;
        scan.squares += away * away;
        scan.least = value < scan.least ? value : scan.least;
        scan.greatest = value > scan.greatest ? value : scan.greatest;
        scan.zeros += value == 0;
    }
    return scan;
}

AVX2 ZERO_APART(scan_avx2, scan_float)
AVX512 ZERO_APART(scan_avx512, scan_intrinsics)
#endif

/* Whether the subtraction that turns squares into m2 cancels, because the mean is large against the spread.
 * Then the first element is the pivot. Being an element bounds the loss: its squared distance from the mean
 * is at most n times the variance, so it costs at most a factor of BLOCK of double's precision. */
INLINE int cancels(Scan scan, double n) {
    return scan.squares - scan.sum * (scan.sum / n) < scan.squares * 0x1p-12;
}

/* Adds n finite elements to the row by Chan's rule. They were scanned after multiplication by `scale`. */
INLINE void merge(double *row, double n, double pivot, Scan scan, double scale) {
    double mean = (pivot + scan.sum / n) / scale, m2 = scan.squares - scan.sum * (scan.sum / n);
    mean = mean < scan.least ? scan.least : mean > scan.greatest ? scan.greatest : mean;
    m2 = m2 > 0 ? m2 / scale / scale : 0;
    const double before = row[COUNT] - row[NANS] - row[INFS];
    if (before == 0) {
        row[MEAN] = mean;
        row[M2] = m2;
    } else { /* in halves, because the difference of two huge means would overflow */
        const double half = mean / 2 - row[MEAN] / 2, step = half * (n / (before + n));
        row[MEAN] += step;
        row[MEAN] += step;
        row[M2] += m2 + 4 * before * half * step;
    }
    row[COUNT] += n;
    row[MIN] = scan.least < row[MIN] ? scan.least : row[MIN];
    row[MAX] = scan.greatest > row[MAX] ? scan.greatest : row[MAX];
    row[ZEROS] += scan.zeros;
}

/* The slow path, for a block with a NaN, an infinity or squares that overflow. What is not finite becomes
 * the pivot, whose deviation is zero; and if it is the size of the squares, everything is scaled down. */
INLINE void merge_careful(double *x, int n, double *row) {
    int64_t nans = 0, finite = 0;
    for (int i = 0; i < n; i++) {
        nans += x[i] != x[i];
        finite += fabs(x[i]) <= DBL_MAX;
    }
    if (finite > 0) {
        double pivot, scale = 1;
        for (int i = 0; pivot = x[i], !isfinite(pivot); i++) continue;
        for (int i = 0; i < n; i++) x[i] = fabs(x[i]) <= DBL_MAX ? x[i] : pivot;
        Scan scan = scan_double(x, n, pivot);
        scan.zeros -= pivot == 0 ? (double)(n - finite) : 0;
        if (!isfinite(scan.squares)) {
            scale = 0x1p-600;
            pivot *= scale;
            for (int i = 0; i < n; i++) x[i] *= scale;
            const Scan scaled = scan_double(x, n, pivot);
            scan.sum = scaled.sum;
            scan.squares = scaled.squares;
        }
        merge(row, (double)finite, pivot, scan, scale);
    }
    row[COUNT] += (double)(n - finite);
    row[NANS] += (double)nans;
    row[INFS] += (double)(n - finite - nans);
}

/* Keys are written down before they are counted, because these loops vectorise and counting does not. */
INLINE void find_keys_float(const float *x, int n, uint16_t *keys) {
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        keys[i] = (uint16_t)(bits >> 22);
    }
}

/* Clamped to what a float's key can say; the buckets are all well inside. */
INLINE void find_keys_double(const double *x, int n, uint16_t *keys) {
    for (int i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        const int32_t top = (int32_t)(bits >> 51), magnitude = top & 0xfff, rebias = 2 * (1023 - 127);
        int32_t key = magnitude > rebias ? magnitude - rebias : 0;
        key = key < NOT_FINITE ? key : NOT_FINITE - 1;
        keys[i] = (uint16_t)((magnitude < 2 * 2047 ? key : NOT_FINITE) | (top >> 12) * SIGN);
    }
}

/* Many are counted in turns in several tables, because an increment has to wait for the previous one of
 * the same counter, and half of an activation can be the same zero. */
INLINE void count(const uint16_t *keys, int n, int32_t tables[TABLES][STRIDE], int many) {
    int i = 0;
    for (; many && i + TABLES <= n; i += TABLES)
        for (int t = 0; t < TABLES; t++) tables[t][keys[i + t]]++;
    for (; i < n; i++) tables[0][keys[i]]++;
}

INLINE void add_buckets(const int32_t *table, int32_t *counts) {
    for (int side = 1; side >= -1; side -= 2, table += SIGN) {
        int32_t inner = 0, outer = 0;
        for (int key = 0; key < LOWEST; key++) inner += table[key];
        for (int i = 1; i <= HALF_OCTAVES; i++) counts[MIDDLE + side * i] += table[LOWEST - 1 + i];
        for (int key = LOWEST + HALF_OCTAVES; key < NOT_FINITE; key++) outer += table[key];
        counts[MIDDLE] += inner;
        counts[MIDDLE + side * HALF_OCTAVES] += outer;
        counts[REJECTED] += table[NOT_FINITE] + table[NOT_FINITE + 1];
    }
}

#define READ(name, type, result)                                                                                 \
    INLINE result name(const char *data, int64_t i) {                                                            \
        type x;                                                                                                  \
        memcpy(&x, data + (int64_t)sizeof x * i, sizeof x); /* any alignment */                                  \
        return x;                                                                                                \
    }

READ(read_f32, float, float)
READ(read_f64, double, double)
READ(read_u16, uint16_t, uint32_t)

INLINE float float_of(uint32_t bits) { return read_f32((const char *)&bits, 0); }

INLINE float read_bf16(const char *data, int64_t i) { return float_of(read_u16(data, i) << 16); }

/* Denormals are converted as the integers that they are, which works even where denormal floats are
 * flushed to zero (torch.set_flush_denormal). Masks instead of branches, hence it vectorises. */
INLINE float read_f16(const char *data, int64_t i) {
    const uint32_t half = read_u16(data, i), magnitude = half & 0x7fff, rebias = (127 - 15) << 23;
    const uint32_t is_denormal = (uint32_t)((int32_t)(magnitude - 0x400) >> 31);
    const uint32_t is_finite = (uint32_t)((int32_t)(magnitude - 0x7c00) >> 31);
    const uint32_t normal = (magnitude << 13) + rebias + (rebias & ~is_finite);
    const float tiny = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t denormal;
    memcpy(&denormal, &tiny, sizeof denormal);
    return float_of((denormal & is_denormal) | (normal & ~is_denormal) | (half & 0x8000) << 16);
}

#define FILL(x, read)                                                                                            \
    if (minus)                                                                                                   \
        for (int i = 0; i < n; i++) x[i] = read(data, start + i) - read(minus, start + i);                       \
    else                                                                                                         \
        for (int i = 0; i < n; i++) x[i] = read(data, start + i)

typedef Scan ScanFloat(const float *, int, double);

INLINE int reduce(const char *data, const char *minus, int64_t size, int dtype, double *row, int32_t *counts,
                  ScanFloat *scan_block) {
    float narrow[BLOCK];
    double wide[BLOCK];
    uint16_t keys[BLOCK];
    int32_t tables[TABLES][STRIDE];
    const int many = size > FEW, used = many ? TABLES : 1;
    int shifted = 0; /* since a block needed a pivot, because the next ones will too */

    if (size < 0 || dtype < F32 || dtype > F16 || (size > 0 && !data)) return -1;
    memset(row, 0, WIDTH * sizeof *row);
    row[MIN] = INFINITY;
    row[MAX] = -INFINITY;
    if (counts) memset(tables, 0, (size_t)used * sizeof *tables);

    for (int64_t start = 0; start < size; start += BLOCK) {
        const int n = size - start < BLOCK ? (int)(size - start) : BLOCK;
        double pivot = 0;
        Scan scan = {0};
        if (dtype == F64) {
            const double *x = wide;
            if (!minus && (uintptr_t)data % _Alignof(double) == 0) {
                x = (const double *)data + start;
            } else {
                FILL(wide, read_f64);
            }
            if (!shifted) scan = scan_double(x, n, 0), shifted = cancels(scan, n);
            if (shifted) scan = scan_double(x, n, pivot = x[0]);
            if (counts) find_keys_double(x, n, keys);
            if (!isfinite(scan.squares) && x != wide) memcpy(wide, x, (size_t)n * sizeof *x);
        } else {
            const float *x = narrow;
            if (dtype == BF16) {
                FILL(narrow, read_bf16);
            } else if (dtype == F16) {
                FILL(narrow, read_f16);
            } else if (!minus && (uintptr_t)data % _Alignof(float) == 0) {
                x = (const float *)data + start;
            } else {
                FILL(narrow, read_f32);
            }
            if (!shifted) scan = scan_block(x, n, 0), shifted = cancels(scan, n);
            if (shifted) scan = scan_block(x, n, pivot = (double)x[0]);
            if (counts) find_keys_float(x, n, keys);
            for (int i = 0; i < n && !isfinite(scan.squares); i++) wide[i] = (double)x[i];
        }
        if (isfinite(scan.squares)) {
            merge(row, n, pivot, scan, 1);
        } else {
            merge_careful(wide, n, row);
        }
        if (counts) count(keys, n, tables, many);
    }
    for (int t = 1; counts && t < used; t++)
        for (int key = 0; key < KEYS; key++) tables[0][key] += tables[t][key];
    if (counts) add_buckets(tables[0], counts);
    return 0;
}

/* The same source compiled for each generation of x86. Chosen at each call: that costs a nanosecond and
 * needs no ifunc, which not every linker has. */
typedef int Reduce(const char *, const char *, int64_t, int, double *, int32_t *);

#define VERSION(name, scan_block)                                                                                \
    static int name(const char *data, const char *minus, int64_t n, int dtype, double *row, int32_t *counts) {   \
        return reduce(data, minus, n, dtype, row, counts, scan_block);                                           \
    }

VERSION(reduce_baseline, scan_baseline)
#if defined(__x86_64__)
AVX2 VERSION(reduce_avx2, scan_avx2)
AVX512 VERSION(reduce_avx512, scan_avx512)
#endif

static Reduce *version(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return reduce_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return reduce_avx2;
#endif
    return reduce_baseline;
}

/* dtype: 0 float32, 1 float64, 2 bfloat16, 3 float16. Writes the 9 numbers of `row`; adds to the 386 of
 * `counts`, the last for what is not finite, unless it is NULL. The data need no alignment. Returns 0, or
 * -1 if it did nothing because of its arguments. */
int tbhooks_reduce(const void *data, int64_t n, int dtype, double *row, int32_t *counts) {
    return version()(data, NULL, n, dtype, row, counts);
}

/* The same of after - before, elementwise: in double for float64, in float for the others. */
int tbhooks_reduce_difference(const void *after, const void *before, int64_t n, int dtype, double *row,
                              int32_t *counts) {
    return version()(after, before, n, dtype, row, counts);
}

/* What kernel.py compares before it uses a library that it finds. */
int tbhooks_abi(void) { return 1; }
