/* Hashes of words and n-grams, and MinHash: the same numbers as ngrams.py and duplicates.py compute with numpy. */

#include <stdint.h>
#include <string.h>

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

/* For each text, whose words begin at firsts[t] and end before firsts[t + 1]: how often its most frequent pair of words occurs, and
   the characters of its longest runs of 2, 3 and 4 words. `pairs` are the hashes of all pairs; `slots` and `counts` have room for
   more than the words of any text. */
int64_t malmoi_run_stats(const uint64_t *pairs, const int64_t *starts, const int64_t *ends, const int64_t *firsts, int64_t texts,
                         int32_t *slots, int32_t *counts, int64_t *found) {
  for (int64_t t = 0; t < texts; t++, found += 4) {
    const int64_t first = firsts[t], words = firsts[t + 1] - first;
    int64_t mask = 1;
    while (mask <= words) mask *= 2;
    memset(slots, 0, mask-- * sizeof *slots);
    memset(found, 0, 4 * sizeof *found);
    for (int64_t i = 0; i < words - 1; i++) {
      const uint64_t pair = pairs[first + i];
      int64_t at = pair & mask;
      while (slots[at] && pairs[first + slots[at] - 1] != pair) at = (at + 1) & mask;
      if (!slots[at]) slots[at] = (int32_t)i + 1, counts[at] = 0;
      if (++counts[at] > found[0]) found[0] = counts[at];
    }
    for (int64_t n = 2; n <= 4; n++)
      for (int64_t i = first; i <= first + words - n; i++) {
        const int64_t size = ends[i + n - 1] - starts[i];
        if (size > found[n - 1]) found[n - 1] = size;
      }
  }
  return texts;
}

/* For each text, the least of (factor * x + term) mod 2^32 over the upper halves x of its n-grams, for each of `hashes` pairs. */
int64_t malmoi_signatures(const uint64_t *ngrams, const int64_t *begins, const int64_t *counts, int64_t texts, const uint32_t *factors,
                          const uint32_t *terms, int64_t hashes, uint32_t *least) {
  for (int64_t t = 0; t < texts; t++, least += hashes)
    for (int64_t first = 0; first < hashes; first += LANES) {
      const int64_t lanes = hashes - first < LANES ? hashes - first : LANES;
      uint32_t factor[LANES] = {0}, term[LANES] = {0}, low[LANES];
      for (int64_t h = 0; h < LANES; h++) low[h] = UINT32_MAX;
      for (int64_t h = 0; h < lanes; h++) factor[h] = factors[first + h], term[h] = terms[first + h];
      for (int64_t i = begins[t]; i < begins[t] + counts[t]; i++) {
        const uint32_t x = (uint32_t)(ngrams[i] >> 32);
        for (int h = 0; h < LANES; h++) {
          const uint32_t y = factor[h] * x + term[h];
          low[h] = y < low[h] ? y : low[h];
        }
      }
      for (int64_t h = 0; h < lanes; h++) least[first + h] = low[h];
    }
  return texts;
}
