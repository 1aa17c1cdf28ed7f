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

typedef struct {
  const uint8_t *weights;
  const uint16_t *scale;
  const float *bias; /* or NULL */
  const float *x;
  float *y;
  long rows, outputs, inputs, group, groups; /* group * groups: the inputs, filled up to a multiple of STRIDE */
} Job;

typedef struct { /* CHUNK rows of x, split */
  int8_t *high, *low;
  int32_t *sums; /* [row][group][2] */
  float step[CHUNK];
} Split;


static void split(const Job *job, long row, long at, Split *to) {
  const long width = job->group * job->groups;
  const float *x = job->x + row * job->inputs;
  int8_t *high = to->high + at * width, *low = to->low + at * width;
  float most = 1e-30f;
  for (long i = 0; i < job->inputs; i++) most = fmaxf(most, fabsf(x[i]));
  const float inverse = 127.0f / most;
  for (long i = 0; i < job->inputs; i++) {
    const float value = x[i] * inverse, near = rintf(value);
    high[i] = (int8_t)near;
    low[i] = (int8_t)rintf((value - near) * 127.0f);
  }
  memset(high + job->inputs, 0, width - job->inputs);
  memset(low + job->inputs, 0, width - job->inputs);
  for (long g = 0; g < job->groups; g++) {
    int32_t coarse = 0, fine = 0;
    for (long i = g * job->group; i < (g + 1) * job->group; i++) coarse += high[i], fine += low[i];
    to->sums[(at * job->groups + g) * 2] = coarse;
    to->sums[(at * job->groups + g) * 2 + 1] = fine;
  }
  to->step[at] = most / 127.0f;
}

/* One block of 16 outputs for `tile` rows; `tile` and `bits` are constants wherever it is called. */
static inline __attribute__((always_inline)) void block_product(const Job *job, const Split *x, long b, long first, long at,
                                                                const int tile, const int bits) {
  const long width = job->group * job->groups;
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
    float *y = job->y + (first + at + r) * job->outputs + b * LANES;
    for (long o = 0; o < lanes; o++) y[o] = found[r][o] * x->step[at + r] + (job->bias ? job->bias[b * LANES + o] : 0.0f);
  }
}

static void block_rows(const Job *job, const Split *x, long b, long first, long count, int bits) {
  long at = 0;
  if (bits == 8) {
    for (; at + TILE <= count; at += TILE) block_product(job, x, b, first, at, TILE, 8);
    for (; at < count; at++) block_product(job, x, b, first, at, 1, 8);
  } else {
    for (; at + TILE <= count; at += TILE) block_product(job, x, b, first, at, TILE, 4);
    for (; at < count; at++) block_product(job, x, b, first, at, 1, 4);
  }
}

/* x [rows, inputs] -> y [rows, outputs], both fp32. 0: done; 1: no memory. */
int malmoi_quantized_linear(const uint8_t *weights, const uint16_t *scale, const float *bias, const float *x, float *y,
                            long rows, long outputs, long inputs, long group, long groups, long bits) {
  static _Thread_local int8_t *room = NULL;
  static _Thread_local size_t held = 0;
  const Job job = {weights, scale, bias, x, y, rows, outputs, inputs, group, groups};
  const long width = group * groups, most = rows < CHUNK ? rows : CHUNK, blocks = (outputs + LANES - 1) / LANES;
  const size_t bytes = (size_t)most * width, needed = 2 * bytes + (size_t)most * groups * 2 * sizeof(int32_t);
  if (needed > held) {
    int8_t *more = realloc(room, needed);
    if (!more) return 1;
    room = more, held = needed;
  }
  Split parts = {room, room + bytes, (int32_t *)(room + 2 * bytes), {0}};
#pragma omp parallel if (rows * outputs * inputs > SERIAL)
  for (long first = 0; first < rows; first += CHUNK) {
    const long count = rows - first < CHUNK ? rows - first : CHUNK;
#pragma omp for schedule(static)
    for (long r = 0; r < count; r++) split(&job, first + r, r, &parts);
#pragma omp for schedule(static)
    for (long b = 0; b < blocks; b++) block_rows(&job, &parts, b, first, count, (int)bits);
  }
  return 0;
}
