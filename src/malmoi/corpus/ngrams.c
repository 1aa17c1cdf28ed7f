/* Hashes of words and n-grams, and MinHash: the same numbers as ngrams.py and duplicates.py compute with numpy. */

#include <stdint.h>

enum { LAST_CODE = 0xFFFF, PLACES = 64, LANES = 16 };

/* SplitMix64's finaliser. */
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/* The words of a text of code points: hashes, starts and ends; returns their number. `values` is 0 for what is in no word. */
int64_t malmoi_hash_words(const uint32_t *codes, int64_t n, const uint64_t *values, const uint64_t *factors, uint64_t *hashes,
                          int64_t *starts, int64_t *ends) {
  int64_t found = 0;
  for (int64_t i = 0; i < n;) {
    uint64_t sum = 0, value;
    const int64_t start = i;
    for (; i < n && (value = values[codes[i] < LAST_CODE ? codes[i] : LAST_CODE]); i++) sum += value * factors[(i - start) & (PLACES - 1)];
    if (i == start) {
      i++;
      continue;
    }
    hashes[found] = mix(sum);
    starts[found] = start;
    ends[found++] = i;
  }
  return found;
}

/* The hash of every `length` consecutive words. */
int64_t malmoi_ngrams(const uint64_t *words, int64_t count, const uint64_t *factors, int64_t length, uint64_t *ngrams) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t sum = 0;
    for (int64_t j = 0; j < length; j++) sum += words[i + j] * factors[j];
    ngrams[i] = mix(sum);
  }
  return count;
}

/* How often the most frequent of some n-grams occurs; `slots` is [mask + 1] of zeros, more than there are n-grams. */
int64_t malmoi_most_frequent(const uint64_t *ngrams, int64_t count, int32_t *slots, int32_t *counts, int64_t mask) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t at = ngrams[i] & mask;
    while (slots[at] && ngrams[slots[at] - 1] != ngrams[i]) at = (at + 1) & mask;
    if (!slots[at]) slots[at] = (int32_t)i + 1, counts[at] = 0;
    if (++counts[at] > most) most = counts[at];
  }
  return most;
}

/* The least of (factor * x + term) mod 2^32 over the upper halves x of n-grams, for each of `hashes` pairs. */
int64_t malmoi_signature(const uint64_t *ngrams, int64_t count, const uint32_t *factors, const uint32_t *terms, int64_t hashes,
                         uint32_t *least) {
  for (int64_t first = 0; first < hashes; first += LANES) {
    const int64_t lanes = hashes - first < LANES ? hashes - first : LANES;
    uint32_t factor[LANES] = {0}, term[LANES] = {0}, low[LANES];
    for (int64_t h = 0; h < LANES; h++) low[h] = UINT32_MAX;
    for (int64_t h = 0; h < lanes; h++) factor[h] = factors[first + h], term[h] = terms[first + h];
    for (int64_t i = 0; i < count; i++) {
      const uint32_t x = (uint32_t)(ngrams[i] >> 32);
      for (int h = 0; h < LANES; h++) {
        const uint32_t y = factor[h] * x + term[h];
        low[h] = y < low[h] ? y : low[h];
      }
    }
    for (int64_t h = 0; h < lanes; h++) least[first + h] = low[h];
  }
  return count;
}
