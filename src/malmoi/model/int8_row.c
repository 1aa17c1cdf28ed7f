/* One row times int8 weights: y = scale * (W x) + bias, as fast as memory gives W.

   W lies in blocks of 16 outputs, [I / 4][16][4], so that one load feeds 16 sums and the whole block is one stream.
   x becomes two bytes, x = step * (high + low / 127), each moved up by 128 because vpdpbusd takes unsigned times signed;
   `sums` of the weights of a row take that back. O outputs, I inputs. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

enum { WIDEST = 65536, AHEAD = 4096 };

static float split(const float *x, uint8_t *high, uint8_t *low, long I) {
  float most = 1e-30f;
  for (long i = 0; i < I; i++) most = fmaxf(most, fabsf(x[i]));
  const float step = most / 127.0f, inverse = 127.0f / most;
  for (long i = 0; i < I; i++) {
    const float value = x[i] * inverse, near = rintf(value);
    high[i] = (uint8_t)(int)(near + 128.0f);
    low[i] = (uint8_t)(int)(rintf((value - near) * 127.0f) + 128.0f);
  }
  return step;
}

int malmoi_int8_row(const int8_t *w, const float *scale, const int32_t *sums, const float *bias, const float *x, float *y,
                    long blocks, long I) {
  static _Thread_local uint8_t bytes[2 * WIDEST] __attribute__((aligned(64)));
  if (I > WIDEST || I % 8) return 1;
  const float step = split(x, bytes, bytes + WIDEST, I);
  const int32_t *high = (const int32_t *)bytes, *low = (const int32_t *)(bytes + WIDEST);
#pragma omp parallel for schedule(static)
  for (long b = 0; b < blocks; b++) {
    const int8_t *at = w + b * 16 * I;
    __m512i h0 = _mm512_setzero_si512(), h1 = h0, l0 = h0, l1 = h0;
    for (long i = 0; i < I / 4; i += 2, at += 128) {
      _mm_prefetch((const char *)(at + AHEAD), _MM_HINT_T0);
      _mm_prefetch((const char *)(at + AHEAD + 64), _MM_HINT_T0);
      const __m512i first = _mm512_loadu_si512(at), second = _mm512_loadu_si512(at + 64);
      h0 = _mm512_dpbusd_epi32(h0, _mm512_set1_epi32(high[i]), first);
      l0 = _mm512_dpbusd_epi32(l0, _mm512_set1_epi32(low[i]), first);
      h1 = _mm512_dpbusd_epi32(h1, _mm512_set1_epi32(high[i + 1]), second);
      l1 = _mm512_dpbusd_epi32(l1, _mm512_set1_epi32(low[i + 1]), second);
    }
    const __m512i moved = _mm512_slli_epi32(_mm512_loadu_si512(sums + b * 16), 7);
    const __m512 coarse = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(h0, h1), moved));
    const __m512 fine = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(l0, l1), moved));
    const __m512 sum = _mm512_fmadd_ps(fine, _mm512_set1_ps(1.0f / 127.0f), coarse);
    const __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale + b * 16));
    _mm512_storeu_ps(y + b * 16, _mm512_fmadd_ps(sum, scaled, _mm512_loadu_ps(bias + b * 16)));
  }
  return 0;
}
