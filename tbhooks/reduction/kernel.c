/* One read of an array of floating point numbers gives the eleven columns of its row (stats.py) and, if
 * asked, its half-octave bucket counts (buckets.py) and a copy. C11 with a plain C ABI.
 *
 *     cc -O3 -fopenmp-simd -fPIC -shared kernel.c -o _kernel.so
 *
 * -fopenmp-simd needs no runtime and starts no threads: it only lets the marked loops add up in several
 * lanes. Without it the results are as good, but slow.
 *
 * The array is read in blocks that stay in the L1 cache while several loops go over them. What is not an
 * aligned array of float or double (halves, differences) is first written to a small buffer. Blocks make
 * up slices, the unit that threads share; they change nothing of the result, to the bit.
 */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { F32, F64, BF16, F16 };
enum { COUNT, MEAN, M2, MIN, MAX, ZEROS, NANS, INFS, BASE, M3, M4, WIDTH };
enum { HALF_OCTAVES = 192, MIDDLE = HALF_OCTAVES, REJECTED = 2 * HALF_OCTAVES + 1, BUCKETS = REJECTED + 1 };

/* A key is a float's sign, exponent and top mantissa bit. Those without a sign: below LOWEST, 2**-64, is
 * the middle bucket; the last two are infinity and NaN. */
enum { SIGN = 512, LOWEST = 2 * (127 - 64), NOT_FINITE = 2 * 255 };

/* FEW: up to there no table pays. STRIDE: were tables 4096 bytes apart, a load would have to wait
 * for the store to the same bucket of another table, because the CPU compares low address bits first. */
enum { BLOCK = 2048, FEW = 384, TABLES = 8, STRIDE = 400 };

/* Two elements are counted at once, as one of all pairs of codes: a sign, and how many half-octaves a magnitude is above
 * `base`; 0 for all below. WORTH_PAIRS: in a smaller array it costs more to empty these tables than they save. HEADROOM:
 * the next blocks may have so many half-octaves more. */
enum { STEPS = 32, CODES = 2 * STEPS, PAIR_TABLES = 2, PAIRS = CODES * CODES, PAIR_STRIDE = PAIRS + 32 };
enum { WORTH_PAIRS = 4096, HEADROOM = 2, AT_ONCE = 64 };

/* Tables are emptied before a sum of their counts could overflow 16 bits. */
enum { MOST_COUNTED = 65535 };

/* WORTH_THREADS: a shorter array is read before other threads have woken up. */
enum { SLICE = 32 * BLOCK, WORTH_THREADS = 2 * SLICE };

/* So many samples are looked at before it is asked whether all units are alive. */
enum { ROWS = 8 };

#define INLINE static inline __attribute__((always_inline))

/* A block of n elements; the sums are of powers of the deviations from a pivot. A NaN or an infinity makes
 * `squares` NaN or infinite: that is the whole test for them. */
typedef struct {
    double sum, squares, cubes, fourths, least, greatest, zeros;
} Scan;

#define SCAN(real, zeros_t)                                                                                      \
    INLINE Scan scan_##real(const real *x, int n, double pivot) {                                                \
        double sum = 0, squares = 0, cubes = 0, fourths = 0;                                                     \
        real least = x[0], greatest = x[0];                                                                      \
        zeros_t zeros = 0; /* as wide as an element, so that its lanes match */                                  \
        _Pragma("omp simd reduction(+ : sum, squares, cubes, fourths, zeros)                                     \
                 reduction(min : least) reduction(max : greatest)")                                              \
        for (int i = 0; i < n; i++) {                                                                            \
            double away = (double)x[i] - pivot, square = away * away;                                            \
            sum += away;                                                                                         \
            squares += square;                                                                                   \
            cubes += square * away;                                                                              \
            fourths += square * square;                                                                          \
            least = x[i] < least ? x[i] : least;                                                                 \
            greatest = x[i] > greatest ? x[i] : greatest;                                                        \
            zeros += x[i] == 0;                                                                                  \
        }                                                                                                        \
        return (Scan){sum, squares, cubes, fourths, (double)least, (double)greatest, (double)zeros};             \
    }

SCAN(float, int32_t)
SCAN(double, int64_t)

/* Subtracting zero from every element is a tenth of the work: a loop of its own is compiled without. The same for
 * `minus`, an array that is subtracted, or NULL: the differences are then written to `x` while they are scanned, so that
 * memory is read without a pause. */
#define ZERO_APART(name, scan)                                                                                   \
    static Scan name(float *x, const float *data, const float *minus, int n, int64_t ahead, double pivot) {      \
        if (minus) return pivot == 0 ? scan(x, data, minus, n, ahead, 0) : scan(x, data, minus, n, ahead, pivot); \
        return pivot == 0 ? scan(x, data, NULL, n, ahead, 0) : scan(x, data, NULL, n, ahead, pivot);             \
    }

INLINE Scan scan_any(float *x, const float *data, const float *minus, int n, int64_t ahead, double pivot) {
    (void)ahead;
    for (int i = 0; i < n && minus; i++) x[i] = data[i] - minus[i];
    return scan_float(minus ? x : data, n, pivot);
}

ZERO_APART(scan_baseline, scan_any)

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

/* The elements that are left when a block is no multiple of the lanes. */
INLINE Scan scan_rest(Scan scan, const float *x, int i, int n, double pivot) {
    for (; i < n; i++) {
        const double value = (double)x[i], away = value - pivot, square = away * away;
        scan.sum += away;
        scan.squares += square;
        scan.cubes += square * away;
        scan.fourths += square * square;
        scan.least = value < scan.least ? value : scan.least;
        scan.greatest = value > scan.greatest ? value : scan.greatest;
        scan.zeros += value == 0;
    }
    return scan;
}

AVX2 INLINE double add_lanes(__m256d x) { return (x[0] + x[1]) + (x[2] + x[3]); }

/* With a third fewer instructions than the compiler finds: each half is widened straight from memory. What is `ahead`, in
 * elements, is fetched into the cache meanwhile: the processor does so only within a page of 4096 bytes. */
AVX2 INLINE Scan scan_8(float *differences, const float *data, const float *minus, int n, int64_t ahead, double pivot) {
    const float *x = minus ? differences : data;
    __m256d sum[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, squares[2] = {sum[0], sum[0]};
    __m256d cubes[2] = {sum[0], sum[0]}, fourths[2] = {sum[0], sum[0]};
    __m256 least = _mm256_set1_ps(INFINITY), greatest = _mm256_set1_ps(-INFINITY);
    __m256i zeros = _mm256_setzero_si256();
    const int even = n / 8 * 8;
#pragma GCC unroll 2
    for (int i = 0; i < even; i += 8) {
        _mm_prefetch((const char *)(data + i + ahead), _MM_HINT_T0);
        if (minus) _mm_prefetch((const char *)(minus + i + ahead), _MM_HINT_T0);
        if (minus) _mm256_storeu_ps(differences + i, _mm256_loadu_ps(data + i) - _mm256_loadu_ps(minus + i));
        __m256 both = _mm256_loadu_ps(x + i);
        least = _mm256_min_ps(least, both);
        greatest = _mm256_max_ps(greatest, both);
        __m256 zero = _mm256_cmp_ps(both, _mm256_setzero_ps(), _CMP_EQ_OQ); /* -1 in each lane that is zero */
        zeros = _mm256_sub_epi32(zeros, _mm256_castps_si256(zero));
        for (int half = 0; half < 2; half++) {
            __m256d away = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * half)) - _mm256_set1_pd(pivot);
            __m256d square = away * away;
            sum[half] += away;
            squares[half] += square;
            cubes[half] = _mm256_fmadd_pd(square, away, cubes[half]);
            fourths[half] = _mm256_fmadd_pd(square, square, fourths[half]);
        }
    }
    float lows[8], highs[8];
    int32_t found[8];
    _mm256_storeu_ps(lows, least);
    _mm256_storeu_ps(highs, greatest);
    _mm256_storeu_si256((__m256i *)found, zeros);
    Scan scan = {add_lanes(sum[0] + sum[1]), add_lanes(squares[0] + squares[1]), add_lanes(cubes[0] + cubes[1]),
                 add_lanes(fourths[0] + fourths[1]), INFINITY, -INFINITY, 0};
    for (int lane = 0; lane < 8; lane++) {
        scan.least = (double)lows[lane] < scan.least ? (double)lows[lane] : scan.least;
        scan.greatest = (double)highs[lane] > scan.greatest ? (double)highs[lane] : scan.greatest;
        scan.zeros += found[lane];
    }
    for (int i = even; i < n && minus; i++) differences[i] = data[i] - minus[i];
    return scan_rest(scan, x, even, n, pivot);
}

/* Zeros are counted under a mask. */
AVX512 INLINE Scan scan_16(float *differences, const float *data, const float *minus, int n, int64_t ahead, double pivot) {
    const float *x = minus ? differences : data;
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX), one = _mm512_set1_epi32(1);
    __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, squares[2] = {sum[0], sum[0]};
    __m512d cubes[2] = {sum[0], sum[0]}, fourths[2] = {sum[0], sum[0]};
    __m512 least = _mm512_set1_ps(INFINITY), greatest = _mm512_set1_ps(-INFINITY);
    __m512i zeros = _mm512_setzero_si512();
    const int even = n / 16 * 16;
#pragma GCC unroll 2
    for (int i = 0; i < even; i += 16) {
        _mm_prefetch((const char *)(data + i + ahead), _MM_HINT_T0);
        if (minus) _mm_prefetch((const char *)(minus + i + ahead), _MM_HINT_T0);
        if (minus) _mm512_storeu_ps(differences + i, _mm512_loadu_ps(data + i) - _mm512_loadu_ps(minus + i));
        __m512 both = _mm512_loadu_ps(x + i);
        least = _mm512_min_ps(least, both);
        greatest = _mm512_max_ps(greatest, both);
        __mmask16 zero = _mm512_testn_epi32_mask(_mm512_castps_si512(both), magnitude);
        zeros = _mm512_mask_add_epi32(zeros, zero, zeros, one);
        for (int half = 0; half < 2; half++) {
            __m512d away = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * half)) - _mm512_set1_pd(pivot);
            __m512d square = away * away;
            sum[half] += away;
            squares[half] += square;
            cubes[half] = _mm512_fmadd_pd(square, away, cubes[half]);
            fourths[half] = _mm512_fmadd_pd(square, square, fourths[half]);
        }
    }
    Scan scan = {_mm512_reduce_add_pd(sum[0] + sum[1]), _mm512_reduce_add_pd(squares[0] + squares[1]),
                 _mm512_reduce_add_pd(cubes[0] + cubes[1]), _mm512_reduce_add_pd(fourths[0] + fourths[1]),
                 (double)_mm512_reduce_min_ps(least), (double)_mm512_reduce_max_ps(greatest),
                 _mm512_reduce_add_epi32(zeros)};
    for (int i = even; i < n && minus; i++) differences[i] = data[i] - minus[i];
    return scan_rest(scan, x, even, n, pivot);
}

AVX2 ZERO_APART(scan_avx2, scan_8)
AVX512 ZERO_APART(scan_avx512, scan_16)
#endif

/* Whether the pivot is more than four standard deviations from the mean. The subtractions that turn sums of
 * powers into central moments would cancel: of the fourth powers they cost a factor of 4**4 of double's precision
 * there, and 2**40 at mean 300 and deviation 0.3. Equal elements need no pivot. */
INLINE int cancels(Scan scan, double n) {
    return scan.least < scan.greatest && scan.squares - scan.sum * (scan.sum / n) < scan.squares * 0x1p-4;
}

/* Scans a block about a pivot, and about its mean if the pivot is too far away. The mean becomes the pivot, because
 * the next blocks will need one like it. */
#define SCAN_CENTRED(scan, scan_block, x, n, pivot)                                                              \
    scan = scan_block(x, n, pivot);                                                                              \
    if (cancels(scan, n)) scan = scan_block(x, n, pivot += scan.sum / (n))

/* Adds n finite elements to the row by the rules of Chan (m2) and Pebay (m3, m4). They were scanned after
 * multiplication by `scale`. */
INLINE void merge(double *row, double n, double pivot, Scan scan, double scale) {
    const double off = scan.sum / n;
    double mean = (pivot + off) / scale, m2 = scan.squares - scan.sum * off;
    double m3 = scan.cubes - off * (3 * scan.squares - 2 * scan.sum * off);
    double m4 = scan.fourths - off * (4 * scan.cubes - off * (6 * scan.squares - 3 * scan.sum * off));
    mean = mean < scan.least ? scan.least : mean > scan.greatest ? scan.greatest : mean;
    m2 = m2 > 0 ? m2 / scale / scale : 0;
    m3 = m3 / scale / scale / scale;
    m4 = m4 / scale / scale / scale / scale;
    if (scan.least == scan.greatest) m2 = m3 = m4 = 0;
    const double before = row[COUNT] - row[NANS] - row[INFS];
    if (before == 0) {
        row[MEAN] = mean;
        row[M2] = m2;
        row[M3] = m3;
        row[M4] = m4;
    } else { /* in halves, because the difference of two huge means would overflow */
        const double a = before / (before + n), b = n / (before + n);
        const double half = mean / 2 - row[MEAN] / 2, step = half * b, away = 2 * half;
        const double between = 4 * before * half * step;
        row[M4] += m4 + between * away * away * (a * a - a * b + b * b) +
                   6 * away * away * (a * a * m2 + b * b * row[M2]) + 4 * away * (a * m3 - b * row[M3]);
        row[M3] += m3 + between * away * (a - b) + 3 * away * (a * m2 - b * row[M2]);
        row[M2] += m2 + between;
        row[MEAN] += step;
        row[MEAN] += step;
    }
    row[COUNT] += n;
    row[MIN] = scan.least < row[MIN] ? scan.least : row[MIN];
    row[MAX] = scan.greatest > row[MAX] ? scan.greatest : row[MAX];
    row[ZEROS] += scan.zeros;
}

/* The slow path, for a block with a NaN, an infinity or squares that overflow. What is not finite is left out;
 * and if it is the size of the squares, everything is scaled down. */
INLINE void merge_careful(double *x, int n, double *row) {
    int64_t nans = 0;
    int finite = 0;
    for (int i = 0; i < n; i++) {
        nans += x[i] != x[i];
        if (fabs(x[i]) <= DBL_MAX) x[finite++] = x[i];
    }
    if (finite > 0) {
        double pivot = x[0], scale = 1;
        Scan scan;
        SCAN_CENTRED(scan, scan_double, x, finite, pivot);
        if (!isfinite(scan.squares)) {
            const Scan unscaled = scan;
            scale = 0x1p-600;
            pivot *= scale;
            for (int i = 0; i < finite; i++) x[i] *= scale;
            SCAN_CENTRED(scan, scan_double, x, finite, pivot);
            scan.least = unscaled.least;
            scan.greatest = unscaled.greatest;
            scan.zeros = unscaled.zeros;
        }
        merge(row, finite, pivot, scan, scale);
    }
    row[COUNT] += (double)(n - finite);
    row[NANS] += (double)nans;
    row[INFS] += (double)(n - finite - nans);
}

/* Buckets are written down before they are counted, because these loops vectorise and counting does not. */
INLINE uint16_t bucket_of(uint16_t key) {
    const int16_t magnitude = (int16_t)(key % SIGN), above = (int16_t)(magnitude - LOWEST + 1);
    const int16_t capped = above < HALF_OCTAVES ? above : HALF_OCTAVES, steps = capped > 0 ? capped : 0;
    const int16_t bucket = (int16_t)(key < SIGN ? MIDDLE + steps : MIDDLE - steps);
    return (uint16_t)(magnitude < NOT_FINITE ? bucket : REJECTED);
}

INLINE void find_buckets_float(const float *x, int n, uint16_t *buckets) {
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        buckets[i] = (uint16_t)(bits >> 22);
    }
    for (int i = 0; i < n; i++) buckets[i] = bucket_of(buckets[i]);
}

/* Clamped to what a float's key can say; the buckets are all well inside. */
INLINE void find_buckets_double(const double *x, int n, uint16_t *buckets) {
    for (int i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        const int32_t top = (int32_t)(bits >> 51), magnitude = top & 0xfff, rebias = 2 * (1023 - 127);
        int32_t key = magnitude > rebias ? magnitude - rebias : 0;
        key = key < NOT_FINITE ? key : NOT_FINITE - 1;
        buckets[i] = bucket_of((uint16_t)((magnitude < 2 * 2047 ? key : NOT_FINITE) | (top >> 12) * SIGN));
    }
}

/* Counts of one array, until they are added to its buckets. The tables are cleared when something is counted. */
typedef struct {
    uint16_t tables[TABLES][STRIDE];
    uint16_t pairs[PAIR_TABLES][PAIR_STRIDE];
    int32_t *counts;
    int is_alone; /* no other thread adds other slices of the same array */
    int counted;  /* how many elements are in `tables` */
    int used;     /* how many pairs are in `pairs` */
    int base;     /* of their codes */
    int left_out; /* how many elements are in `tables`, although `pairs` has counted them as below `base` */
    int misses;   /* in how many blocks in a row many elements were below `base` */
} Tally;

/* Adds as many to each bucket; `n` has room for a whole number of vectors. */
static void add_to_buckets(const Tally *tally, const uint16_t n[STRIDE]) {
    int32_t *counts = tally->counts;
    if (tally->is_alone)
        for (int i = 0; i < BUCKETS; i++) counts[i] += n[i];
    else
        for (int i = 0; i < BUCKETS; i++)
            if (n[i]) __atomic_fetch_add(&counts[i], n[i], __ATOMIC_RELAXED);
}

static void empty_tables(Tally *tally) {
    for (int t = 1; t < TABLES; t++)
        for (int i = 0; i < STRIDE; i++) tally->tables[0][i] = (uint16_t)(tally->tables[0][i] + tally->tables[t][i]);
    if (tally->counted) add_to_buckets(tally, tally->tables[0]);
    tally->counted = 0;
}

static void empty_pairs(Tally *tally) {
    uint16_t first[CODES] = {0}, second[CODES], found[STRIDE] = {0};
    for (int r = 0; r < CODES; r++) {
        uint16_t total = 0;
        for (int c = 0; c < CODES; c++) {
            uint16_t n = 0;
            for (int t = 0; t < PAIR_TABLES; t++) n = (uint16_t)(n + tally->pairs[t][r * CODES + c]);
            first[c] = (uint16_t)(first[c] + n);
            total = (uint16_t)(total + n);
        }
        second[r] = total;
    }
    for (int code = 0; code < CODES; code++) {
        const int step = code % STEPS, key = (code / STEPS) * SIGN + tally->base + step;
        uint16_t *into = &found[step ? bucket_of((uint16_t)key) : MIDDLE];
        *into = (uint16_t)(*into + first[code] + second[code]);
    }
    found[MIDDLE] = (uint16_t)(found[MIDDLE] - tally->left_out);
    if (tally->used) add_to_buckets(tally, found);
    tally->used = tally->left_out = 0;
}

static void tally_for(Tally *tally, int32_t *counts) {
    if (tally->counts == counts) return;
    if (tally->counts && tally->counted) empty_tables(tally);
    if (tally->counts && tally->used) empty_pairs(tally);
    tally->counted = tally->used = tally->left_out = tally->misses = 0;
    tally->counts = counts;
}

/* Makes room for n more elements in the tables. */
INLINE void use_tables(Tally *tally, int n) {
    if (tally->counted + n > MOST_COUNTED) empty_tables(tally);
    if (tally->counted == 0) memset(tally->tables, 0, sizeof tally->tables);
    tally->counted += n;
}

/* In turns in several tables, because an increment has to wait for the previous one of the same counter,
 * and half of an activation can be the same zero. */
INLINE void count(const uint16_t *buckets, int n, Tally *tally) {
    int i = 0;
    use_tables(tally, n);
    for (; i + TABLES <= n; i += TABLES)
        for (int t = 0; t < TABLES; t++) tally->tables[t][buckets[i + t]]++;
    for (; i < n; i++) tally->tables[0][buckets[i]]++;
}

INLINE void count_few(const uint16_t *buckets, int n, int32_t *counts) {
    for (int i = 0; i < n; i++) counts[buckets[i]]++;
}

/* What is to be done with a block of floats that are all finite: count it, unless it has to be counted by `count`. */
typedef int CountPairs(const float *, int, Scan, Tally *);

#if defined(__x86_64__)
/* Makes room for the pairs of a block; the first after that chooses a base for its greatest magnitude. */
static void prepare_pairs(Tally *tally, int top) {
    if (tally->used && (top >= tally->base + STEPS || 2 * tally->used + BLOCK > MOST_COUNTED)) empty_pairs(tally);
    if (tally->used == 0) tally->base = top > STEPS ? top + HEADROOM - (STEPS - 1) : 0;
}

INLINE int magnitude_of(double x) {
    const float single = (float)fabs(x);
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    return (int)(bits >> 22);
}

/* The keys of those in `chosen` are written to `keys_below`, in any order; returns how many. */
AVX512 INLINE int write_below(uint32_t *keys_below, __m512i keys, __mmask32 chosen) {
    /* As wide as AVX512F can compress. */
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(keys));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(keys, 1));
    const int found = __builtin_popcount(chosen & 0xffff);
    _mm512_storeu_si512(keys_below, _mm512_maskz_compress_epi32((__mmask16)chosen, first));
    _mm512_storeu_si512(keys_below + found, _mm512_maskz_compress_epi32((__mmask16)(chosen >> 16), second));
    return found + __builtin_popcount(chosen >> 16);
}

/* 32 pairs of elements. Both tables are used in turns, as in `count`. */
INLINE void add_pairs(Tally *tally, const uint16_t *pairs) {
#pragma GCC unroll 32
    for (int i = 0; i < AT_ONCE / 2; i++) tally->pairs[i % PAIR_TABLES][pairs[i]]++;
}

/* Returns how many elements were counted: a multiple of 64, or 0 if pairs do not pay for this array. The keys of those
 * below `base` are written down and counted one by one; if they are many, the next block chooses a base of its own.
 * Pairs are counted while those of the next elements are found, since the one waits for memory and the other computes. */
AVX512 static int count_pairs(const float *x, int n, Scan scan, Tally *tally) {
    uint16_t pairs[BLOCK / 2];
    uint32_t below[BLOCK + 32];
    const int even = n / AT_ONCE * AT_ONCE, low = magnitude_of(scan.least), high = magnitude_of(scan.greatest);
    int found = 0;
    if (tally->misses > 1) return 0;
    prepare_pairs(tally, low > high ? low : high);
    if (tally->used == 0) memset(tally->pairs, 0, sizeof tally->pairs);
    const __m512i base = _mm512_set1_epi16((short)tally->base), sign = _mm512_set1_epi16(STEPS);
    const __m512i magnitude = _mm512_set1_epi16(SIGN - 1), lowest = _mm512_set1_epi16(LOWEST);
    const __m512i both = _mm512_set1_epi16(1 | CODES << 8);
    for (int i = 0; i < even; i += AT_ONCE) {
        __m512i keys[2], codes[2];
        __mmask32 is_below[2];
        for (int h = 0; h < 2; h++) {
            const __m512i a = _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(x + i + 32 * h)), 22);
            const __m512i b = _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(x + i + 32 * h + 16)), 22);
            keys[h] = _mm512_packus_epi32(a, b); /* in another order, which does not matter */
            const __m512i magnitudes = _mm512_and_si512(keys[h], magnitude);
            const __m512i above = _mm512_subs_epu16(magnitudes, base);
            codes[h] = _mm512_or_si512(above, _mm512_and_si512(_mm512_srli_epi16(keys[h], 4), sign));
            is_below[h] = _mm512_mask_testn_epi16_mask(_mm512_cmpge_epi16_mask(magnitudes, lowest), above, above);
        }
        const __m512i narrow = _mm512_packus_epi16(codes[0], codes[1]);
        _mm512_storeu_si512(pairs + i / 2, _mm512_maddubs_epi16(narrow, both));
        if (i) add_pairs(tally, pairs + (i - AT_ONCE) / 2);
        if (is_below[0] | is_below[1])
            for (int h = 0; h < 2; h++) found += write_below(below + found, keys[h], is_below[h]);
    }
    if (even) add_pairs(tally, pairs + (even - AT_ONCE) / 2);
    if (found) use_tables(tally, found);
    for (int i = 0; i < found; i++) tally->tables[i % TABLES][bucket_of((uint16_t)below[i])]++;
    tally->used += even / 2, tally->left_out += found;
    tally->misses = found > n / 8 ? tally->misses + 1 : 0;
    if (tally->misses) empty_pairs(tally);
    return even;
}
#endif

#define READ(name, type, result)                                                                                 \
    INLINE result name(const char *data, int64_t i) {                                                            \
        type x;                                                                                                  \
        memcpy(&x, data + (int64_t)sizeof x * i, sizeof x); /* any alignment */                                  \
        return x;                                                                                                \
    }

READ(read_f32, float, float)
READ(read_f64, double, double)
READ(read_u8, uint8_t, uint32_t)
READ(read_u16, uint16_t, uint32_t)
READ(read_u32, uint32_t, uint32_t)
READ(read_u64, uint64_t, uint64_t)

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

typedef Scan ScanFloat(float *, const float *, const float *, int, int64_t, double);

/* What is to be done with one array; every field is 8 bytes long, so that an array of integers can hold many. */
typedef struct {
    const char *data;
    const char *minus; /* subtracted elementwise, in double for float64 and in float for the others; or NULL */
    char *copy;        /* the data are written there too; or NULL */
    int64_t size;
    int64_t dtype;
    double *row;
    int32_t *counts; /* 386, added to: the last is for what is not finite; or NULL */
} Job;

static const int64_t WIDTHS[] = {[F32] = 4, [F64] = 8, [BF16] = 2, [F16] = 2};

INLINE void start_row(double *row) {
    memset(row, 0, WIDTH * sizeof *row);
    row[MIN] = INFINITY;
    row[MAX] = -INFINITY;
}

/* A copy from this many bytes on is not expected to be in the cache when it is read again. */
enum { WORTH_STREAM = 1 << 18 };

/* `is_long` copies are written past the cache: a line that is written there would be read from memory first. */
INLINE void copy_block(char *to, const char *from, int64_t size, int is_long) {
    int64_t done = 0;
#if defined(__x86_64__)
    if (is_long && (uintptr_t)to % 16 == 0) {
        for (; done + 64 <= size; done += 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(to + done + i), _mm_loadu_si128((const __m128i *)(from + done + i)));
        _mm_sfence();
    }
#else
    (void)is_long;
#endif
    memcpy(to + done, from + done, (size_t)(size - done));
}

INLINE void reduce(const Job *job, int64_t start, double *row, Tally *tally, ScanFloat *scan_block, CountPairs *pairs) {
    float narrow[BLOCK];
    double wide[BLOCK];
    uint16_t buckets[BLOCK];
    const char *data = job->data, *minus = job->minus;
    const int64_t stop = job->size - start < SLICE ? job->size : start + SLICE;
    double pivot = 0;

    start_row(row);
    for (; start < stop; start += BLOCK) {
        const int n = stop - start < BLOCK ? (int)(stop - start) : BLOCK;
        int counted = 0;
        Scan scan;
        if (job->dtype == F64) {
            const double *x = wide;
            if (!minus && (uintptr_t)data % _Alignof(double) == 0) {
                x = (const double *)data + start;
            } else {
                FILL(wide, read_f64);
            }
            SCAN_CENTRED(scan, scan_double, x, n, pivot);
            if (job->counts) find_buckets_double(x, n, buckets);
            if (!isfinite(scan.squares) && x != wide) memcpy(wide, x, (size_t)n * sizeof *x);
        } else {
            const float *x = narrow, *less = NULL;
            if (job->dtype == BF16) {
                FILL(narrow, read_bf16);
            } else if (job->dtype == F16) {
                FILL(narrow, read_f16);
            } else if (((uintptr_t)data | (uintptr_t)minus) % _Alignof(float) == 0) {
                x = (const float *)data + start;
                if (minus) less = (const float *)minus + start;
            } else {
                FILL(narrow, read_f32);
            }
            const int64_t left = x == narrow ? 0 : job->size - start - n, ahead = left < BLOCK ? left : BLOCK;
            scan = scan_block(narrow, x, less, n, ahead, pivot);
            if (less) x = narrow;
            if (cancels(scan, n)) scan = scan_block(NULL, x, NULL, n, 0, pivot += scan.sum / n);
            if (job->counts && pairs && job->size >= WORTH_PAIRS && isfinite(scan.squares))
                counted = pairs(x, n, scan, tally);
            if (job->counts && counted < n) find_buckets_float(x + counted, n - counted, buckets);
            for (int i = 0; i < n && !isfinite(scan.squares); i++) wide[i] = (double)x[i];
        }
        if (job->copy) {
            const int64_t width = WIDTHS[job->dtype];
            copy_block(job->copy + start * width, data + start * width, n * width, job->size * width >= WORTH_STREAM);
        }
        if (isfinite(scan.squares)) {
            merge(row, n, pivot, scan, 1);
        } else {
            merge_careful(wide, n, row);
        }
        if (job->counts && job->size <= FEW) {
            count_few(buckets, n, job->counts);
        } else if (job->counts && counted < n) {
            count(buckets, n - counted, tally);
        }
    }
}

/* The same source compiled for each generation of x86. Chosen at each call: that costs a nanosecond and
 * needs no ifunc, which not every linker has. */
typedef void Reduce(const Job *, int64_t, double *, Tally *);

#define VERSION(name, scan_block, pairs)                                                                         \
    static void name(const Job *job, int64_t start, double *row, Tally *tally) {                                 \
        reduce(job, start, row, tally, scan_block, pairs);                                                       \
    }

VERSION(reduce_baseline, scan_baseline, NULL)
#if defined(__x86_64__)
AVX2 VERSION(reduce_avx2, scan_avx2, NULL)
AVX512 VERSION(reduce_avx512, scan_avx512, count_pairs)
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

/* Adds the row of the next slice. */
static void merge_rows(double *row, const double *slice) {
    const double n = slice[COUNT] - slice[NANS] - slice[INFS];
    const Scan scan = {0, slice[M2], slice[M3], slice[M4], slice[MIN], slice[MAX], slice[ZEROS]};
    if (n > 0) merge(row, n, slice[MEAN], scan, 1);
    row[COUNT] += slice[COUNT] - n;
    row[NANS] += slice[NANS];
    row[INFS] += slice[INFS];
}

typedef struct {
    const Job *job;
    int64_t start;
    double row[WIDTH];
} Slice;

typedef struct {
    Slice *slices;
    int64_t count, next;
    Reduce *run;
} Work;

INLINE void reduce_slice(const Job *job, int64_t start, double *row, Tally *tally, Reduce *run) {
    if (job->counts && job->size > FEW) tally_for(tally, job->counts);
    run(job, start, row, tally);
}

static void take_slices(void *shared) {
    Work *work = shared;
    Tally tally;
    int64_t i;
    tally.counts = NULL;
    tally.is_alone = 0;
    while ((i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count) {
        Slice *slice = &work->slices[i];
        reduce_slice(slice->job, slice->start, slice->row, &tally, work->run);
    }
    tally_for(&tally, NULL);
}

/* How threads are started: GOMP_parallel of the OpenMP library that torch has loaded, whose threads wait
 * already. Without one everything is done by the calling thread. Always as many as torch uses: with fewer the
 * library ends the others, and new ones may compute otherwise (flushed denormals). And only where one array is
 * so long that torch has started them itself: a process with threads is not the same after a fork. */
typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);
static Parallel *parallel;

void tbhooks_use(Parallel *with) { parallel = with; }

static int reduce_in_parallel(const Job *jobs, int64_t n, int64_t slices, unsigned threads, Reduce *run) {
    Work work = {malloc((size_t)slices * sizeof(Slice)), 0, 0, run};
    if (!work.slices) return 0;
    for (const Job *job = jobs; job < jobs + n; job++)
        for (int64_t start = 0; start < job->size; start += SLICE) work.slices[work.count++] = (Slice){job, start, {0}};
    parallel(take_slices, &work, threads, 0);
    for (int64_t i = 0; i < slices; i++) merge_rows(work.slices[i].job->row, work.slices[i].row);
    free(work.slices);
    return 1;
}

static void reduce_in_turn(const Job *jobs, int64_t n, Reduce *run) {
    Tally tally;
    tally.counts = NULL;
    tally.is_alone = 1;
    for (const Job *job = jobs; job < jobs + n; job++) {
        for (int64_t start = 0; start < job->size; start += SLICE) {
            double row[WIDTH];
            reduce_slice(job, start, row, &tally, run);
            merge_rows(job->row, row);
        }
    }
    tally_for(&tally, NULL);
}

static int is_sound(const Job *job) {
    return job->size >= 0 && job->dtype >= F32 && job->dtype <= F16 && (job->size == 0 || job->data);
}

/* dtype: 0 float32, 1 float64, 2 bfloat16, 3 float16. Writes the 11 numbers of each row. The data need no
 * alignment. Returns 0, or -1 if it did nothing because of its arguments. */
int tbhooks_reduce_all(const Job *jobs, int64_t n, int64_t threads) {
    int64_t slices = 0, longest = 0;
    for (const Job *job = jobs; job < jobs + n; job++) {
        if (!is_sound(job)) return -1;
        slices += job->size / SLICE + (job->size % SLICE > 0);
        longest = job->size > longest ? job->size : longest;
    }
    for (const Job *job = jobs; job < jobs + n; job++) start_row(job->row);
    if (parallel && threads > 1 && longest >= WORTH_THREADS)
        if (reduce_in_parallel(jobs, n, slices, (unsigned)threads, version())) return 0;
    reduce_in_turn(jobs, n, version());
    return 0;
}

/* One array, for callers to whom packing a Job is a cost. */
int tbhooks_reduce(const void *data, int64_t size, int64_t dtype, double *row, int32_t *counts, int64_t threads) {
    const Job job = {data, NULL, NULL, size, dtype, row, counts};
    return tbhooks_reduce_all(&job, 1, threads);
}

/* Whether any of n values is not zero, minus zero counted as zero; `size` bytes each. */
static int any(const char *data, int64_t n, int64_t size) {
    for (int64_t i = 0; i < n;) {
        const int64_t stop = n - i < AT_ONCE ? n : i + AT_ONCE;
        uint64_t bits = 0;
        if (size == 4)
            for (; i < stop; i++) bits |= read_u32(data, i) << 1;
        else if (size == 8)
            for (; i < stop; i++) bits |= read_u64(data, i) << 1;
        else
            for (; i < stop; i++) bits |= (uint16_t)(read_u16(data, i) << 1);
        if (bits) return 1;
    }
    return 0;
}

/* The same of single values, `rows` for each of n units: sets alive[unit] to 1, and returns how many are not. */
#define MARK_ALIVE(read, word)                                                                                   \
    _Pragma("omp simd reduction(+ : silent)") for (int64_t u = 0; u < n; u++) {                                  \
        word bits = 0;                                                                                           \
        for (int64_t r = 0; r < rows; r++) bits |= (word)read(data, r * n + u);                                  \
        const float is = (word)(bits << 1) || alive[u] != 0 ? 1 : 0;                                             \
        alive[u] = is;                                                                                           \
        silent += is == 0;                                                                                       \
    }
INLINE int32_t mark_alive(const char *data, const int64_t rows, int64_t n, int64_t size, float *alive) {
    int32_t silent = 0;
    if (size == 4) {
        MARK_ALIVE(read_u32, uint32_t)
    } else if (size == 8) {
        MARK_ALIVE(read_u64, uint64_t)
    } else {
        MARK_ALIVE(read_u16, uint16_t)
    }
    return silent;
}

/* Of values [outer][units][inner], sets alive[unit] to 1 where any of a unit's is not zero. Units that are
 * known to be alive are not read: of a layer without dead units, hardly anything is. */
int tbhooks_find_alive(const char *data, int64_t dtype, int64_t outer, int64_t units, int64_t inner, float *alive) {
    if (dtype < F32 || dtype > F16 || outer < 0 || units < 0 || inner < 0) return -1;
    const int64_t size = WIDTHS[dtype], run = inner * size;
    int64_t silent = units, o = 0;
    if (inner == 1) {
        for (; o + ROWS <= outer && silent; o += ROWS)
            silent = mark_alive(data + o * run * units, ROWS, units, size, alive);
        for (; o < outer && silent; o++) silent = mark_alive(data + o * run * units, 1, units, size, alive);
        return 0;
    }
    for (; o < outer && silent; o++) {
        silent = 0;
        for (int64_t u = 0; u < units; u++, data += run) {
            if (alive[u] == 0 && any(data, inner, size)) alive[u] = 1;
            silent += alive[u] == 0;
        }
    }
    return 0;
}

/* The sum of signed integers of `width` bytes and that of their squares, modulo 2**64 (data/checksums.py). */
INLINE void add_words(const char *data, int64_t start, int64_t stop, int64_t width, uint64_t *sums) {
    uint64_t sum = 0, squares = 0;
#define ADD(read, word)                                                                                          \
    _Pragma("omp simd reduction(+ : sum, squares)") for (int64_t i = start; i < stop; i++) {                     \
        const int64_t w = (word)read(data, i);                                                                   \
        sum += (uint64_t)w;                                                                                      \
        squares += (uint64_t)w * (uint64_t)w;                                                                    \
    }
    if (width == 4) {
        ADD(read_u32, int32_t)
    } else if (width == 2) {
        ADD(read_u16, int16_t)
    } else if (width == 8) {
        ADD(read_u64, int64_t)
    } else {
        ADD(read_u8, int8_t)
    }
#undef ADD
    sums[0] += sum;
    sums[1] += squares;
}

typedef void AddWords(const char *, int64_t, int64_t, int64_t, uint64_t *);

static void add_words_baseline(const char *data, int64_t start, int64_t stop, int64_t width, uint64_t *sums) {
    add_words(data, start, stop, width, sums);
}
#if defined(__x86_64__)
AVX2 static void add_words_avx2(const char *data, int64_t start, int64_t stop, int64_t width, uint64_t *sums) {
    add_words(data, start, stop, width, sums);
}
#endif

typedef struct {
    const char *data;
    int64_t size, width, next;
    AddWords *run;
    uint64_t sums[2];
} Words;

static void take_words(void *shared) {
    Words *words = shared;
    uint64_t sums[2] = {0, 0};
    int64_t start;
    while ((start = __atomic_fetch_add(&words->next, SLICE, __ATOMIC_RELAXED)) < words->size)
        words->run(words->data, start, words->size - start < SLICE ? words->size : start + SLICE, words->width, sums);
    for (int i = 0; i < 2; i++) __atomic_fetch_add(&words->sums[i], sums[i], __ATOMIC_RELAXED);
}

int tbhooks_sum_words(const char *data, int64_t size, int64_t width, uint64_t *sums, int64_t threads) {
    Words words = {data, size, width, 0, add_words_baseline, {0, 0}};
    if (size < 0 || (size && !data) || (width != 1 && width != 2 && width != 4 && width != 8)) return -1;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) words.run = add_words_avx2;
#endif
    if (parallel && threads > 1 && size >= WORTH_THREADS)
        parallel(take_words, &words, (unsigned)threads, 0);
    else
        take_words(&words);
    memcpy(sums, words.sums, sizeof words.sums);
    return 0;
}

/* What kernel.py compares before it uses a library that it finds. */
int tbhooks_abi(void) { return 4; }
