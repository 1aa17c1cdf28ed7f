/* Activations times 8- or 4-bit weights: y = x W^T + bias, limited only by the memory bandwidth for W.

   W is stored in blocks of 16 outputs, each contiguous: for every 8 inputs [2][16][4] numbers, so that one load feeds 16 sums.
   At 4 bits a byte holds the number of one of the first four inputs in its low half and of the second four in its high half, each plus 8.
   `scale` is bf16, one per group of inputs and output: [block][group][16].
   x is split into two signed bytes, x = step * (high + low / 127), which loses less than bf16. Unsigned numbers (always at 4 bits,
   and at 8 on x86, whose vpdpbusd multiplies unsigned by signed) are corrected by `sums`, the sums of x over each group. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
enum { TILE = 4, MOVED8 = 128 };
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
enum { TILE = 2, MOVED8 = 0 };
#else
#error "no int8 dot products"
#endif

enum { LANES = 16, STRIDE = 8, MOVED4 = 8, CHUNK = 64, SERIAL = 1 << 15 };

enum { NONE, GELU, GELU_TANH, RELU, RELU2, SILU }; /* activations */

typedef struct {
  const uint8_t *weights;
  const uint16_t *scale;
  const float *bias; /* or NULL */
  long outputs, inputs, group, groups, bits; /* group * groups: the inputs, filled up to a multiple of STRIDE */
} Linear;

typedef struct { /* CHUNK rows of x, split */
  int8_t *high, *low;
  int32_t *sums; /* [row][group][2] */
  float *step;   /* [row] */
} Split;

typedef struct { /* what becomes of the outputs */
  float *y;
  int activation;
  int add; /* to what y holds */
} Target;

static long padded(const Linear *map) { return map->group * map->groups; }

/* Bytes of `rows` split rows. */
static size_t split_bytes(const Linear *map, long rows) {
  return (size_t)rows * (2 * padded(map) + map->groups * 2 * sizeof(int32_t) + sizeof(float));
}

static Split split_in(int8_t *room, const Linear *map, long rows) {
  int32_t *sums = (int32_t *)(room + 2 * rows * padded(map));
  return (Split){room, room + rows * padded(map), sums, (float *)(sums + rows * map->groups * 2)};
}

static void split(const Linear *map, const float *x, long at, const Split *to) {
  const long width = padded(map);
  int8_t *high = to->high + at * width, *low = to->low + at * width;
  float most = 1e-30f;
  for (long i = 0; i < map->inputs; i++) most = fmaxf(most, fabsf(x[i]));
  const float inverse = 127.0f / most;
  for (long i = 0; i < map->inputs; i++) {
    const float value = x[i] * inverse, near = rintf(value);
    high[i] = (int8_t)near;
    low[i] = (int8_t)rintf((value - near) * 127.0f);
  }
  memset(high + map->inputs, 0, width - map->inputs);
  memset(low + map->inputs, 0, width - map->inputs);
  for (long g = 0; g < map->groups; g++) {
    int32_t coarse = 0, fine = 0;
    for (long i = g * map->group; i < (g + 1) * map->group; i++) coarse += high[i], fine += low[i];
    to->sums[(at * map->groups + g) * 2] = coarse;
    to->sums[(at * map->groups + g) * 2 + 1] = fine;
  }
  to->step[at] = most / 127.0f;
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

/* One block of 16 outputs for `tile` rows; `tile` and `bits` are constants wherever it is called. */
static inline __attribute__((always_inline)) void block_product(const Linear *job, const Split *x, const Target *to, long b, long at,
                                                                const int tile, const int bits) {
  const long width = padded(job);
  const int32_t moved = bits == 4 ? MOVED4 : MOVED8;
  const uint8_t *w = job->weights + b * LANES * width * bits / 8;
  float found[TILE][LANES];
#if defined(__AVX512VNNI__)
  const __m512i nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8((char)0x80);
  __m512 total[TILE];
  for (int r = 0; r < tile; r++) total[r] = _mm512_setzero_ps();
  for (long g = 0; g < job->groups; g++) {
    __m512i h[TILE][2], l[TILE][2];
    for (int r = 0; r < tile; r++) {
      const int32_t *sums = x->sums + ((at + r) * job->groups + g) * 2;
      h[r][0] = _mm512_set1_epi32(-moved * sums[0]), h[r][1] = _mm512_setzero_si512();
      l[r][0] = _mm512_set1_epi32(-moved * sums[1]), l[r][1] = _mm512_setzero_si512();
    }
    for (long i = g * job->group; i < (g + 1) * job->group; i += STRIDE, w += 16 * bits) {
      __m512i part[2];
      const __m512i loaded = _mm512_loadu_si512(w);
      _mm_prefetch((const char *)(w + 4096), _MM_HINT_T0);
      if (bits == 8) {
        _mm_prefetch((const char *)(w + 4160), _MM_HINT_T0);
        part[0] = _mm512_xor_si512(loaded, flip);
        part[1] = _mm512_xor_si512(_mm512_loadu_si512(w + 64), flip);
      } else {
        part[0] = _mm512_and_si512(loaded, nibble);
        part[1] = _mm512_and_si512(_mm512_srli_epi16(loaded, 4), nibble);
      }
      for (int r = 0; r < tile; r++)
        for (int k = 0; k < 2; k++) {
          int32_t high, low;
          memcpy(&high, x->high + (at + r) * width + i + 4 * k, 4);
          memcpy(&low, x->low + (at + r) * width + i + 4 * k, 4);
          h[r][k] = _mm512_dpbusd_epi32(h[r][k], part[k], _mm512_set1_epi32(high));
          l[r][k] = _mm512_dpbusd_epi32(l[r][k], part[k], _mm512_set1_epi32(low));
        }
    }
    const __m256i bits16 = _mm256_loadu_si256((const void *)(job->scale + (b * job->groups + g) * LANES));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits16), 16));
    for (int r = 0; r < tile; r++) {
      const __m512 coarse = _mm512_cvtepi32_ps(_mm512_add_epi32(h[r][0], h[r][1]));
      const __m512 fine = _mm512_cvtepi32_ps(_mm512_add_epi32(l[r][0], l[r][1]));
      total[r] = _mm512_fmadd_ps(_mm512_fmadd_ps(fine, _mm512_set1_ps(1.0f / 127.0f), coarse), scale, total[r]);
    }
  }
  for (int r = 0; r < tile; r++) _mm512_storeu_ps(found[r], total[r]);
#else
  const uint8x16_t nibble = vdupq_n_u8(15);
  float32x4_t total[TILE][4];
  for (int r = 0; r < tile; r++)
    for (int j = 0; j < 4; j++) total[r][j] = vdupq_n_f32(0);
  for (long g = 0; g < job->groups; g++) {
    int32x4_t h[TILE][4], l[TILE][4];
    for (int r = 0; r < tile; r++) {
      const int32_t *sums = x->sums + ((at + r) * job->groups + g) * 2;
      for (int j = 0; j < 4; j++) h[r][j] = vdupq_n_s32(-moved * sums[0]), l[r][j] = vdupq_n_s32(-moved * sums[1]);
    }
    for (long i = g * job->group; i < (g + 1) * job->group; i += STRIDE, w += 16 * bits) {
      int8x8_t high[TILE], low[TILE];
      for (int r = 0; r < tile; r++) {
        high[r] = vld1_s8(x->high + (at + r) * width + i);
        low[r] = vld1_s8(x->low + (at + r) * width + i);
      }
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
        for (int r = 0; r < tile; r++) {
          h[r][j] = vdotq_lane_s32(vdotq_lane_s32(h[r][j], part[0], high[r], 0), part[1], high[r], 1);
          l[r][j] = vdotq_lane_s32(vdotq_lane_s32(l[r][j], part[0], low[r], 0), part[1], low[r], 1);
        }
      }
    }
    for (int j = 0; j < 4; j++) {
      const uint16x4_t bits16 = vld1_u16(job->scale + (b * job->groups + g) * LANES + 4 * j);
      const float32x4_t scale = vreinterpretq_f32_u32(vshll_n_u16(bits16, 16));
      for (int r = 0; r < tile; r++) {
        const float32x4_t sum = vfmaq_n_f32(vcvtq_f32_s32(h[r][j]), vcvtq_f32_s32(l[r][j]), 1.0f / 127.0f);
        total[r][j] = vfmaq_f32(total[r][j], sum, scale);
      }
    }
  }
  for (int r = 0; r < tile; r++)
    for (int j = 0; j < 4; j++) vst1q_f32(found[r] + 4 * j, total[r][j]);
#endif
  const long left = job->outputs - b * LANES, lanes = left < LANES ? left : LANES;
  for (int r = 0; r < tile; r++) {
    float *y = to->y + (at + r) * job->outputs + b * LANES;
    for (long o = 0; o < lanes; o++) found[r][o] = found[r][o] * x->step[at + r] + (job->bias ? job->bias[b * LANES + o] : 0.0f);
    activate(found[r], LANES, to->activation);
    for (long o = 0; o < lanes; o++) y[o] = found[r][o] + (to->add ? y[o] : 0.0f);
  }
}

/* `count` split rows times every block; the threads of the team share the blocks. */
static void multiply(const Linear *map, const Split *x, const Target *to, long count) {
  const long blocks = (map->outputs + LANES - 1) / LANES;
#pragma omp for schedule(static)
  for (long b = 0; b < blocks; b++) {
    long at = 0;
    if (map->bits == 8) {
      for (; at + TILE <= count; at += TILE) block_product(map, x, to, b, at, TILE, 8);
      for (; at < count; at++) block_product(map, x, to, b, at, 1, 8);
    } else {
      for (; at + TILE <= count; at += TILE) block_product(map, x, to, b, at, TILE, 4);
      for (; at < count; at++) block_product(map, x, to, b, at, 1, 4);
    }
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

/* x [rows, inputs] -> y [rows, outputs], both fp32. 0: done; 1: no memory. */
int malmoi_quantized_linear(const Linear *map, const float *x, float *y, long rows) {
  const long most = rows < CHUNK ? rows : CHUNK;
  int8_t *room = scratch(split_bytes(map, most));
  if (!room) return 1;
  const Split parts = split_in(room, map, most);
#pragma omp parallel if (rows * map->outputs * map->inputs > SERIAL)
  for (long first = 0; first < rows; first += CHUNK) {
    const long count = rows - first < CHUNK ? rows - first : CHUNK;
    const Target to = {y + first * map->outputs, NONE, 0};
#pragma omp for schedule(static)
    for (long r = 0; r < count; r++) split(map, x + (first + r) * map->inputs, r, &parts);
    multiply(map, &parts, &to, count);
  }
  return 0;
}
