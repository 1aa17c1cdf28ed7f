/* Activations times 8- or 4-bit weights: y = x W^T + bias, limited only by the memory bandwidth for W.

   W is stored in blocks of 16 outputs, each contiguous: for every 8 inputs [2][16][4] numbers, so that one load feeds 16 sums.
   At 4 bits a byte holds the number of one of the first four inputs in its low half and of the second four in its high half, each plus 8.
   `scale` is bf16, one per group of inputs and output: [block][group][16].
   x is split into two signed bytes, x = step * (high + low / 127), which loses less than bf16; x86 without VNNI multiplies 16 bits by 16,
   so there x is one number, 127 * high + low. Unsigned numbers (always at 4 bits, and at 8 with VNNI, whose vpdpbusd multiplies unsigned
   by signed) are corrected by `sums`, the sums of x over each group. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
enum { TILE = 8, WIDE = 2, MOVED8 = 128 };
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
enum { TILE = 4, WIDE = 1, MOVED8 = 0 };
#elif defined(__AVX512BW__) || defined(__AVX2__)
#define PAIRS /* vpmaddwd: sums of two products of 16 bits */
#else
#error "no instructions for products of whole numbers"
#endif

#if defined(__AVX512F__)
enum { VECTOR = 16, QUERIES = 8, FLOAT_ROWS = 4 }; /* floats of a register; rows of attention and of products whose sums fit into registers */
#elif defined(__AVX2__)
enum { VECTOR = 8, QUERIES = 4, FLOAT_ROWS = 2 };
#else
enum { VECTOR = 4, QUERIES = 4, FLOAT_ROWS = 4 };
#endif

/* Cells of a row: PARTS at most, up to MOST. A step is shared by no more than SHARED inputs where x is one cell: on PAIRS 1024
   because products of up to 128 * 127 * 127 are to be added in 32 bits, which hold 1040 of them. */
#if defined(PAIRS)
enum { TILE = VECTOR / 2, FEWEST = 3, WIDE = 1, REST = 1, MOVED8 = 0, PARTS = 1, MOST = 127 * 127, SHARED = 1024 };
typedef int16_t Cell;
#else
enum { FEWEST = TILE, REST = 2, PARTS = 2, MOST = 127, SHARED = 128 };
typedef int8_t Cell;
#endif

enum { LANES = 16, STRIDE = 8, MOVED4 = 8, CHUNK = 64, SPREAD = 128, SERIAL = 1 << 15 };

enum { NONE, GELU, GELU_TANH, RELU, RELU2, SILU }; /* activations */

typedef struct {
  const uint8_t *weights;
  const uint16_t *scale;
  const float *bias; /* or NULL */
  long outputs, inputs, group, groups, bits; /* group * groups: the inputs, filled up to a multiple of STRIDE */
} Linear; /* 32 bits: plain floats, `group` from output to output and `groups` from input to input, of which one is 1 */

enum { ROWS = 8, COLUMNS = 512 }; /* rows at once of weights of 32 bits, most outputs whose sums of these lie in the nearest cache */
typedef float Vector __attribute__((vector_size(4 * VECTOR), aligned(4)));

/* x as rows of cells: one a row (`parts` 1: 8 bits, on PAIRS 15) or two (15 bits). TILE of them lie together, STRIDE cells of each in turn. */
typedef struct {
  const float *plain; /* for weights of 32 bits, whose x is left as it is, and the floats from row to row */
  long apart;
  Cell *cells;        /* [tile][width / STRIDE][TILE][STRIDE] */
  int32_t *sums;      /* [row of cells][group], times what corrects unsigned weights */
  float *step;        /* [row][group] */
  long group, groups; /* inputs that share a step; the last group may be shorter */
  int parts;
} Split;

typedef struct { /* what becomes of the outputs */
  float *y; /* [rows, outputs] */
  long rows;
  int activation;
  int add; /* to what y holds */
} Target;

static long padded(const Linear *map) { return map->group * map->groups; }

int omp_get_num_threads(void); /* some compilers lack the header */

static long at_most(long a, long b) { return a < b ? a : b; }

static long ceiling(long n, long unit) { return (n + unit - 1) / unit; }

/* Inputs that share a step: those that share a scale or, in one cell, no more than SHARED, so that an outlier spoils few others. */
static long step_group(const Linear *map, int parts) {
  const long most = parts == 1 ? at_most(map->group, SHARED) : map->group;
  long n = ceiling(map->group, most);
  if (map->groups == 1) return most;
  while (map->group % (n * STRIDE)) n++;
  return map->group / n;
}

/* Bytes of `rows` split rows. */
static size_t split_bytes(const Linear *map, long rows, int parts) {
  if (map->bits == 32) return 0;
  const long filled = ceiling(rows * parts, TILE) * TILE, groups = ceiling(padded(map), step_group(map, parts));
  return filled * (padded(map) * sizeof(Cell) + groups * (sizeof(int32_t) + sizeof(float)));
}

static Split split_in(int8_t *room, const Linear *map, long rows, int parts) {
  const long filled = ceiling(rows * parts, TILE) * TILE, group = step_group(map, parts), groups = ceiling(padded(map), group);
  int32_t *sums = (int32_t *)(room + filled * padded(map) * sizeof(Cell));
  return (Split){NULL, 0, (Cell *)room, sums, (float *)(sums + filled * groups), group, groups, parts};
}

/* To the nearest whole number, in a way that compilers vectorise. */
static inline int32_t whole(float x) { return (int32_t)(x + copysignf(0.5f, x)); }

/* Up to SPREAD numbers as cells into a tile, zeros up to `n`; the sum of these. On PAIRS in the order 0, 2, 1, 3, in which
   shifts widen four weights. */
static int32_t put(const float *value, long filled, long n, Cell *tile) {
  Cell row[SPREAD];
  int32_t near[SPREAD], sum = 0;
  for (long i = 0; i < filled; i++) near[i] = whole(value[i]);
  for (long i = filled; i < n; i++) near[i] = 0;
  for (long i = 0; i < n; i++) row[i] = (Cell)near[i], sum += near[i];
#if defined(PAIRS)
  for (long i = 0; i < n; i += 4) row[i + 1] = (Cell)near[i + 2], row[i + 2] = (Cell)near[i + 1];
#endif
  for (long i = 0; i < n; i += STRIDE) memcpy(tile + i * TILE, row + i, STRIDE * sizeof(Cell));
  return sum;
}

static void split(const Linear *map, const float *x, long row, const Split *to) {
  const long width = padded(map), first = row * to->parts;
  const int32_t moved = map->bits == 4 ? MOVED4 : MOVED8;
  Cell *tile = to->cells + first / TILE * TILE * width + first % TILE * STRIDE;
  for (long g = 0; g < to->groups; g++) {
    const long from = g * to->group, end = at_most(from + to->group, width), filled = at_most(end, map->inputs);
    float most = 1e-30f, value[SPREAD];
    for (long i = from; i < filled; i++) most = fmaxf(most, fabsf(x[i]));
    const float inverse = MOST / most;
    int32_t coarse = 0, fine = 0;
    for (long i = from; i < end; i += SPREAD) {
      const long n = at_most(end - i, SPREAD), given = at_most(filled - i, SPREAD);
      for (long k = 0; k < given; k++) value[k] = x[i + k] * inverse;
      coarse += put(value, given, n, tile + i * TILE);
      if (to->parts == 1) continue;
      for (long k = 0; k < given; k++) value[k] = (value[k] - (float)whole(value[k])) * 127.0f;
      fine += put(value, given, n, tile + i * TILE + STRIDE);
    }
    to->sums[first * to->groups + g] = -moved * coarse;
    if (to->parts == 2) to->sums[(first + 1) * to->groups + g] = -moved * fine;
    to->step[row * to->groups + g] = most / MOST;
  }
}

/* e^x to 2e-7, in steps that the compiler vectorises. */
static inline float exp_of(float x) {
  x = fminf(fmaxf(x, -87.0f), 88.0f);
  const float n = rintf(x * 1.44269504f), r = x - n * 0.693147181f;
  const float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

/* erf to 1.5e-7 (Abramowitz and Stegun 7.1.26). */
static inline float erf_of(float x) {
  const float z = fabsf(x), t = 1.0f / (1.0f + 0.3275911f * z);
  const float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return copysignf(1.0f - p * exp_of(-z * z), x);
}

static void activate(float *v, long n, int activation) {
  switch (activation) {
    case GELU:
      for (long i = 0; i < n; i++) v[i] = 0.5f * v[i] * (1.0f + erf_of(v[i] * 0.707106781f));
      break;
    case GELU_TANH:
      for (long i = 0; i < n; i++) v[i] = v[i] / (1.0f + exp_of(-1.59576912f * (v[i] + 0.044715f * v[i] * v[i] * v[i])));
      break;
    case RELU:
      for (long i = 0; i < n; i++) v[i] = fmaxf(v[i], 0.0f);
      break;
    case RELU2:
      for (long i = 0; i < n; i++) v[i] = fmaxf(v[i], 0.0f) * fmaxf(v[i], 0.0f);
      break;
    case SILU:
      for (long i = 0; i < n; i++) v[i] = v[i] / (1.0f + exp_of(-v[i]));
      break;
  }
}

/* Bias, activation and place of some outputs of a row. */
static inline void finish(const Linear *map, const Target *to, long row, long first, long count, float *found) {
  float *y = to->y + row * map->outputs + first;
  if (map->bias)
    for (long o = 0; o < count; o++) found[o] += map->bias[first + o];
  if (to->activation) activate(found, count, to->activation);
  for (long o = 0; o < count; o++) y[o] = found[o] + (to->add ? y[o] : 0.0f);
}

/* Sums of 4 outputs, whose inputs lie one after another and before those of the next 4, for `tile` rows. */
static inline __attribute__((always_inline)) void dots(const float *const *w, const float *x, long apart, long n, float *found,
                                                       const int tile) {
  Vector sum[4][FLOAT_ROWS] = {0};
  long i = 0;
  for (; i + VECTOR <= n; i += VECTOR)
    for (int k = 0; k < 4; k++) {
      const Vector weight = *(const Vector *)(w[k] + i);
      __builtin_prefetch(w[k] + i + 4 * n);
      for (int r = 0; r < tile; r++) sum[k][r] += weight * *(const Vector *)(x + r * apart + i);
    }
  for (int r = 0; r < tile; r++)
    for (int k = 0; k < 4; k++) {
      float total = 0.0f;
      for (int l = 0; l < VECTOR; l++) total += sum[k][r][l];
      for (long j = i; j < n; j++) total += w[k][j] * x[r * apart + j];
      found[r * COLUMNS + k] = total;
    }
}

/* Sums of `count` outputs, which lie one after another for each input, for `rows` of `tile` rows: eight inputs at a time, read in long
   runs. */
static inline __attribute__((always_inline)) void columns(const float *w, long step, const float *x, long apart, long n, long count,
                                                          float found[ROWS][COLUMNS], long rows, const int tile) {
  for (int r = 0; r < tile; r++) memset(found[r], 0, count * sizeof(float));
  for (long i = 0; i < n; i += STRIDE, w += STRIDE * step) {
    const long held = at_most(n - i, STRIDE);
    float in[ROWS][STRIDE] = {0};
    for (int r = 0; r < rows; r++) memcpy(in[r], x + r * apart + i, held * sizeof(float));
    const float *from[STRIDE];
    for (int k = 0; k < STRIDE; k++) from[k] = w + at_most(k, held - 1) * step;
    long o = 0;
    for (; o + VECTOR <= count; o += VECTOR)
      for (int r = 0; r < tile; r++) {
        Vector sum = *(Vector *)(found[r] + o);
        for (int k = 0; k < STRIDE; k++) {
          if (r == 0) __builtin_prefetch(from[k] + o + STRIDE * step);
          sum += in[r][k] * *(const Vector *)(from[k] + o);
        }
        *(Vector *)(found[r] + o) = sum;
      }
    for (; o < count; o++)
      for (int r = 0; r < rows; r++)
        for (int k = 0; k < STRIDE; k++) found[r][o] += in[r][k] * from[k][o];
  }
}

/* Some outputs of weights of 32 bits for up to ROWS rows from `row`. */
static void plain_block(const Linear *map, const Split *x, const Target *to, long first, long count, long row) {
  const float *w = (const float *)map->weights + first * map->group, *in = x->plain + row * x->apart;
  const long rows = at_most(to->rows - row, ROWS), n = map->inputs;
  float found[ROWS][COLUMNS];
  if (map->groups > 1 && rows > 4) columns(w, map->groups, in, x->apart, n, count, found, rows, ROWS);
  if (map->groups > 1 && rows > 1 && rows <= 4) columns(w, map->groups, in, x->apart, n, count, found, rows, 4);
  if (map->groups > 1 && rows == 1) columns(w, map->groups, in, x->apart, n, count, found, 1, 1);
  for (long o = 0; o < count && map->groups == 1; o += 4) {
    const float *four[4];
    for (int k = 0; k < 4; k++) four[k] = w + at_most(o + k, count - 1) * map->group;
    long r = 0;
    for (; r + FLOAT_ROWS <= rows; r += FLOAT_ROWS) dots(four, in + r * x->apart, x->apart, n, found[r] + o, FLOAT_ROWS);
    for (; r < rows; r++) dots(four, in + r * x->apart, x->apart, n, found[r] + o, 1);
  }
  for (int r = 0; r < rows; r++) finish(map, to, row + r, first, count, found[r]);
}

/* Rows times weights of 32 bits; each thread of the team has a run of outputs. */
static void plain_product(const Linear *map, const Split *x, const Target *to) {
  const long share = ceiling(ceiling(map->outputs, omp_get_num_threads()), LANES) * LANES;
  const long each = at_most(share, map->groups > 1 ? COLUMNS : LANES);
#pragma omp for schedule(static)
  for (long first = 0; first < map->outputs; first += each)
    for (long row = 0; row < to->rows; row += ROWS) plain_block(map, x, to, first, at_most(map->outputs - first, each), row);
}

#if defined(__AVX512VNNI__)
static inline __m512 scales_at(const uint16_t *from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}
#endif

#if defined(PAIRS)
typedef int32_t Whole __attribute__((vector_size(4 * VECTOR), aligned(4)));
typedef uint16_t Words __attribute__((vector_size(4 * VECTOR), aligned(1)));
typedef uint16_t Scales __attribute__((vector_size(2 * VECTOR), aligned(2)));

static inline Vector scales_at(const uint16_t *from) { return (Vector)(__builtin_convertvector(*(const Scales *)from, Whole) << 16); }

/* In assembler because compilers take all products before the sums, for which they have no registers. */
static inline __attribute__((always_inline)) void add_pairs(Whole *sum, Words a, Words b) {
  Whole both;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(*sum), "=v"(both) : "v"(a), "v"(b));
}

/* The inputs 0 and 2, or 1 and 3 (`odd`), of the first or the second `four` of VECTOR outputs. */
static inline Words words_at(const uint8_t *w, const int four, const int odd, const int bits) {
  if (bits == 4) return *(const Words *)w >> (8 * odd + 4 * four) & 15;
  typedef int16_t Signed __attribute__((vector_size(4 * VECTOR)));
  const Words both = *(const Words *)(w + 64 * four);
  return (Words)((Signed)(odd ? both : both << 8) >> 8);
}
#endif

/* Where the scales of a group of x begin in those of a block. */
static inline long scale_place(const Linear *map, const Split *x, long g) {
  return map->groups > 1 ? g * x->group / map->group * LANES : 0;
}

/* WIDE blocks of 16 outputs for `tile` rows of cells from `at`; `tile`, `bits` and `parts` are constants wherever it is called. */
static inline __attribute__((always_inline)) void block_product(const Linear *job, const Split *x, const Target *to, long b, long at,
                                                                const int tile, const int bits, const int parts) {
  const long width = padded(job), row = at / parts;
  const Cell *in = x->cells + at / TILE * TILE * width + at % TILE * STRIDE;
  const uint8_t *w = job->weights + b * LANES * width * bits / 8;
  float found[TILE][WIDE * LANES];
#if defined(__AVX512VNNI__)
  const __m512i nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8((char)0x80);
  const long beyond = b + 1 < ceiling(job->outputs, LANES) ? job->groups : 0, apart = beyond ? LANES * width * bits / 8 : 0;
  const uint16_t *scales = job->scale + b * job->groups * LANES;
  __m512 total[TILE][WIDE] = {0};
  for (long g = 0; g < x->groups; g++) {
    __m512i sum[TILE][WIDE];
    for (int r = 0; r < tile; r++) sum[r][0] = sum[r][1] = _mm512_set1_epi32(x->sums[(at + r) * x->groups + g]);
    for (long i = at_most(x->group, width - g * x->group); i > 0; i -= STRIDE, w += 16 * bits, in += TILE * STRIDE) {
      __m512i part[WIDE][2];
      for (int c = 0; c < WIDE; c++) {
        const __m512i loaded = _mm512_loadu_si512(w + c * apart);
        for (int line = 0; line < 2 && tile < TILE; line++) _mm_prefetch((const char *)(w + c * apart + 2048 + 64 * line), _MM_HINT_T0);
        if (bits == 8) {
          part[c][0] = _mm512_xor_si512(loaded, flip);
          part[c][1] = _mm512_xor_si512(_mm512_loadu_si512(w + c * apart + 64), flip);
        } else {
          part[c][0] = _mm512_and_si512(loaded, nibble);
          part[c][1] = _mm512_and_si512(_mm512_srli_epi16(loaded, 4), nibble);
        }
      }
      for (int k = 0; k < 2; k++)
        for (int r = 0; r < tile; r++) { /* in assembler because compilers copy the sums to and fro */
          const __m512i four = _mm512_set1_epi32(*(const int32_t *)(in + r * STRIDE + 4 * k));
          for (int c = 0; c < WIDE; c++) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r][c]) : "v"(part[c][k]), "v"(four));
        }
    }
    for (int c = 0; c < WIDE; c++) {
      const __m512 scale = scales_at(scales + c * beyond * LANES + scale_place(job, x, g));
      for (int r = 0; r < tile / parts; r++) {
        __m512 dot = _mm512_cvtepi32_ps(sum[r * parts][c]);
        if (parts == 2) dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[2 * r + 1][c]), _mm512_set1_ps(1.0f / 127.0f), dot);
        if (job->groups > 1) dot = _mm512_mul_ps(dot, scale);
        total[r][c] = _mm512_fmadd_ps(dot, _mm512_set1_ps(x->step[(row + r) * x->groups + g]), total[r][c]);
      }
    }
  }
  for (int c = 0; c < WIDE; c++) {
    const __m512 scale = job->groups > 1 ? _mm512_set1_ps(1.0f) : scales_at(scales + c * beyond * LANES);
    for (int r = 0; r < tile / parts; r++) _mm512_storeu_ps(found[r] + c * LANES, _mm512_mul_ps(total[r][c], scale));
  }
#elif defined(PAIRS)
  enum { HALVES = LANES / VECTOR };
  const uint16_t *scales = job->scale + b * job->groups * LANES;
  Vector total[TILE][HALVES] = {0};
  for (long g = 0; g < x->groups; g++) {
    Whole sum[TILE][HALVES];
    for (int r = 0; r < tile; r++)
      for (int h = 0; h < HALVES; h++) sum[r][h] = (Whole){0} + x->sums[(at + r) * x->groups + g];
    for (long i = at_most(x->group, width - g * x->group); i > 0; i -= STRIDE, w += 16 * bits, in += TILE * STRIDE) {
      for (int line = 0; line < bits / 4; line++) __builtin_prefetch(w + 2048 + 64 * line);
      for (int k = 0; k < 4; k++) {
        Words part[HALVES];
        for (int h = 0; h < HALVES; h++) part[h] = words_at(w + 4 * VECTOR * h, k / 2, k % 2, bits);
        for (int r = 0; r < tile; r++) {
          const Words two = (Words)((Whole){0} + *(const int32_t *)(in + r * STRIDE + 2 * k));
          for (int h = 0; h < HALVES; h++) add_pairs(&sum[r][h], part[h], two);
        }
      }
    }
    for (int h = 0; h < HALVES; h++) {
      const Vector scale = scales_at(scales + scale_place(job, x, g) + h * VECTOR);
      for (int r = 0; r < tile; r++) total[r][h] += __builtin_convertvector(sum[r][h], Vector) * (scale * x->step[(row + r) * x->groups + g]);
    }
  }
  for (int r = 0; r < tile; r++)
    for (int h = 0; h < HALVES; h++) *(Vector *)(found[r] + h * VECTOR) = total[r][h];
#else
  const uint8x16_t nibble = vdupq_n_u8(15);
  float32x4_t total[TILE][4];
  for (int r = 0; r < tile / parts; r++)
    for (int j = 0; j < 4; j++) total[r][j] = vdupq_n_f32(0);
  for (long g = 0; g < x->groups; g++) {
    const uint16_t *scales = job->scale + b * job->groups * LANES + scale_place(job, x, g);
    int32x4_t sum[TILE][4];
    for (int r = 0; r < tile; r++)
      for (int j = 0; j < 4; j++) sum[r][j] = vdupq_n_s32(x->sums[(at + r) * x->groups + g]);
    for (long i = at_most(x->group, width - g * x->group); i > 0; i -= STRIDE, w += 16 * bits, in += TILE * STRIDE) {
      int8x16_t pair[TILE / 2];
      for (int r = 0; r < tile; r += 2) pair[r / 2] = vld1q_s8(in + r * STRIDE);
      for (int j = 0; j < 4; j++) {
        int8x16_t part[2];
        const uint8x16_t loaded = vld1q_u8(w + 16 * j);
        if (bits == 8) {
          part[0] = vreinterpretq_s8_u8(loaded);
          part[1] = vreinterpretq_s8_u8(vld1q_u8(w + 64 + 16 * j));
        } else {
          part[0] = vreinterpretq_s8_u8(vandq_u8(loaded, nibble));
          part[1] = vreinterpretq_s8_u8(vshrq_n_u8(loaded, 4));
        }
        for (int r = 0; r < tile; r += 2) {
          const int8x16_t both = pair[r / 2];
          sum[r][j] = vdotq_laneq_s32(vdotq_laneq_s32(sum[r][j], part[0], both, 0), part[1], both, 1);
          sum[r + 1][j] = vdotq_laneq_s32(vdotq_laneq_s32(sum[r + 1][j], part[0], both, 2), part[1], both, 3);
        }
      }
    }
    for (int j = 0; j < 4; j++) {
      const float32x4_t scale = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(scales + 4 * j), 16));
      for (int r = 0; r < tile / parts; r++) {
        float32x4_t dot = vcvtq_f32_s32(sum[r * parts][j]);
        if (parts == 2) dot = vfmaq_n_f32(dot, vcvtq_f32_s32(sum[2 * r + 1][j]), 1.0f / 127.0f);
        if (job->groups > 1) dot = vmulq_f32(dot, scale);
        total[r][j] = vfmaq_n_f32(total[r][j], dot, x->step[(row + r) * x->groups + g]);
      }
    }
  }
  for (int r = 0; r < tile / parts; r++)
    for (int j = 0; j < 4; j++) {
      const float32x4_t scale = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(job->scale + b * LANES + 4 * j), 16)); /* one group */
      vst1q_f32(found[r] + 4 * j, job->groups > 1 ? total[r][j] : vmulq_f32(total[r][j], scale));
    }
#endif
  const long rows = at_most(to->rows - row, tile / parts), count = at_most(job->outputs - b * LANES, WIDE * LANES);
  for (int r = 0; r < rows; r++)
    if (count == WIDE * LANES) /* of which a compiler needs no loop */
      finish(job, to, row + r, b * LANES, WIDE * LANES, found[r]);
    else
      finish(job, to, row + r, b * LANES, count, found[r]);
}

/* Every row times WIDE blocks: tiles with at least FEWEST, then REST rows of cells at a time. */
static inline __attribute__((always_inline)) void rows_product(const Linear *map, const Split *x, const Target *to, long b,
                                                               const int bits, const int parts) {
  long at = 0;
  for (; at + FEWEST <= to->rows * parts; at += TILE) block_product(map, x, to, b, at, TILE, bits, parts);
  for (; at < to->rows * parts; at += REST) block_product(map, x, to, b, at, REST, bits, parts);
}

/* Split rows times every block; the threads of the team share the blocks. */
static void multiply(const Linear *map, const Split *x, const Target *to) {
  const long blocks = ceiling(map->outputs, LANES);
  if (map->bits == 32) return plain_product(map, x, to);
#pragma omp for schedule(static)
  for (long b = 0; b < blocks; b += WIDE) {
    if (map->bits == 8 && x->parts == PARTS) rows_product(map, x, to, b, 8, PARTS);
    if (map->bits == 4 && x->parts == PARTS) rows_product(map, x, to, b, 4, PARTS);
    if (PARTS > 1 && map->bits == 8 && x->parts == 1) rows_product(map, x, to, b, 8, 1);
    if (PARTS > 1 && map->bits == 4 && x->parts == 1) rows_product(map, x, to, b, 4, 1);
  }
}

/* A buffer of this thread that lives on between calls; NULL: no memory. */
static int8_t *scratch(size_t needed) {
  static _Thread_local int8_t *room = NULL;
  static _Thread_local size_t held = 0;
  if (needed > held) {
    int8_t *more = realloc(room, needed);
    if (!more) return NULL;
    room = more, held = needed;
  }
  return room;
}
