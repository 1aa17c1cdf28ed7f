/* Hashes of words and n-grams, what the filter counts, and MinHash: the same numbers as ngrams.py, filter.py and duplicates.py compute
   without it. */

#include <stdint.h>
#include <string.h>

enum { LAST_CODE = 0xFFFF, PLACES = 64, LANES = 16 };

/* SplitMix64's finaliser. */
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/* The words of a text of code points: hashes, starts and ends; returns their number. `values` is 0 for what is in no word; places are
   counted from `offset`. */
int64_t malmoi_hash_words(const uint32_t *codes, int64_t n, int64_t offset, const uint64_t *values, const uint64_t *factors,
                          uint64_t *hashes, int64_t *starts, int64_t *ends) {
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
    starts[found] = start + offset;
    ends[found++] = i + offset;
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

/* A place of a hash table: an n-gram and how often it occurred, or a part of a text and its length. 0: free. */
typedef struct {
  uint64_t key;
  int32_t first, count;
} Slot;

static int64_t clear(Slot *slots, int64_t items) {
  int64_t size = 1;
  while (size < items + items / 2 + 1) size *= 2;
  memset(slots, 0, size * sizeof *slots);
  return size - 1;
}

/* Characters in the most frequent run of n words (of several the one with the least hash); 0 if none is repeated. */
static int64_t covered(const uint64_t *words, const int64_t *starts, const int64_t *ends, int64_t count, int64_t n, const uint64_t *factors,
                       Slot *slots) {
  const int64_t mask = clear(slots, count);
  int64_t most = 1, first = 0;
  uint64_t least = 0;
  for (int64_t i = 0; i <= count - n; i++) {
    uint64_t key = 0;
    for (int64_t j = 0; j < n; j++) key += words[i + j] * factors[j];
    key = mix(key);
    Slot *slot = slots + (key & mask);
    while (slot->count && slot->key != key) slot = slot - slots == mask ? slots : slot + 1;
    if (!slot->count) slot->key = key, slot->first = (int32_t)i;
    if (++slot->count > most || (slot->count == most && most > 1 && key < least)) most = slot->count, least = key, first = slot->first;
  }
  return most > 1 ? most * (ends[first + n - 1] - starts[first]) : 0;
}

/* Characters in parts of a text that occurred before in it, where `breaks` line breaks separate parts. */
static int64_t repeated(const uint32_t *codes, int64_t size, int64_t breaks, int64_t parts, Slot *slots) {
  const int64_t mask = clear(slots, parts);
  int64_t begin = 0, found = 0;
  uint64_t hash = 0;
  for (int64_t i = 0; i <= size; i++) {
    if (i < size && (codes[i] != '\n' || (breaks == 2 && (i + 1 == size || codes[i + 1] != '\n')))) {
      hash = (hash ^ codes[i]) * 0x9E3779B97F4A7C15u;
      continue;
    }
    const int64_t length = i - begin;
    const uint64_t key = mix(hash);
    Slot *slot = slots + (key & mask);
    while (slot->count && (slot->key != key || slot->count != length || memcmp(codes + slot->first, codes + begin, length * sizeof *codes)))
      slot = slot - slots == mask ? slots : slot + 1;
    if (slot->count) found += length;
    slot->key = key, slot->first = (int32_t)begin, slot->count = (int32_t)length;
    i += breaks - 1;
    begin = i + 1;
    hash = 0;
  }
  return found;
}

/* At least as many as the most frequent pair of words: pairs are counted in a small table, some of them together. */
static int64_t most_pairs(const uint64_t *words, int64_t count, const uint64_t *factors) {
  uint32_t counts[4096], most = 0;
  int bits = 1;
  while (bits < 12 && (int64_t)1 << bits < count) bits++;
  memset(counts, 0, sizeof *counts << bits);
  for (int64_t i = 0; i < count - 1; i++) {
    const uint32_t found = ++counts[(words[i] * factors[0] + words[i + 1] * factors[1]) >> (64 - bits)];
    most = found > most ? found : most;
  }
  return most;
}

/* Characters in the most frequent run of 2, 3 or 4 words, the first of these that makes up more than its share of the text; 0: none. */
static int64_t repeated_run(const uint64_t *words, const int64_t *starts, const int64_t *ends, int64_t count, const uint64_t *factors,
                            const double *shares, int64_t size, Slot *slots) {
  const int64_t most = most_pairs(words, count, factors);
  for (int64_t n = 2; n <= 4 && most > 1; n++) {
    const double limit = shares[n - 2] * size;
    int64_t longest = 0, found;
    for (int64_t i = 0; i <= count - n; i++) longest = ends[i + n - 1] - starts[i] > longest ? ends[i + n - 1] - starts[i] : longest;
    if (most * longest > limit && (found = covered(words, starts, ends, count, n, factors, slots)) > limit) return found;
  }
  return 0;
}

enum { LETTER = 1, COUNTED = 2, ELLIPSIS = 4, BULLET = 8, BULLET_BEFORE_SPACE = 16 }; /* kinds of characters */
enum { CHARACTERS, WORDS, WORD_CHARACTERS, LETTERS, SPACES, SYMBOLS, LINES, BULLETS, ELLIPSES, REPEATED_LINES, REPEATED_PARAGRAPHS, REPEATED_RUN, COLUMNS };

static inline uint8_t kind(const uint8_t *kinds, uint32_t code) { return kinds[code < LAST_CODE ? code : LAST_CODE]; }

static void count_line(const uint32_t *codes, int64_t size, const uint8_t *kinds, int64_t *found) {
  if (!size) return;
  const uint8_t first = kind(kinds, codes[0]), last = kind(kinds, codes[size - 1]);
  found[LINES]++;
  found[BULLETS] += first & BULLET || (first & BULLET_BEFORE_SPACE && size > 1 && codes[1] == ' ');
  found[ELLIPSES] += last & ELLIPSIS ||
                     (size > 2 && codes[size - 1] == '.' && codes[size - 2] == '.' && codes[size - 3] == '.');
}

/* What the filter counts in each text (`TextStats` in filter.py). Text t has sizes[t] characters from begins[t] on and the words from
   firsts[t] to before lasts[t]; `slots` has room for more than the words and the lines of any text. */
int64_t malmoi_text_stats(int64_t texts, const uint32_t *codes, const uint64_t *words, const int64_t *starts, const int64_t *ends,
                          const int64_t *begins, const int64_t *sizes, const int64_t *firsts, const int64_t *lasts, const uint8_t *kinds,
                          const uint64_t *factors, const double *shares, Slot *slots, int64_t *found) {
  for (int64_t t = 0; t < texts; t++, found += COLUMNS) {
    const uint32_t *text = codes + begins[t];
    const int64_t size = sizes[t], first = firsts[t], count = lasts[t] - first;
    int64_t letters = 0, breaks = 0, blank_lines = 0, line = 0;
    memset(found, 0, COLUMNS * sizeof *found);
    found[CHARACTERS] = size;
    found[WORDS] = count;
    for (int64_t i = first; i < first + count; i++) found[WORD_CHARACTERS] += ends[i] - starts[i];
    for (int64_t i = 0; i < size; i++) {
      const uint8_t is = kind(kinds, text[i]);
      letters += is & LETTER;
      if (!(is & COUNTED)) continue;
      if (text[i] == ' ') {
        found[SPACES]++;
      } else if (text[i] == '\n') {
        found[SPACES]++;
        breaks++;
        blank_lines += i > 0 && text[i - 1] == '\n';
        count_line(text + line, i - line, kinds, found);
        line = i + 1;
      } else if (text[i] == '.') { /* three make one ellipsis */
        const int64_t begin = i;
        while (i + 1 < size && text[i + 1] == '.') i++;
        found[SYMBOLS] += (i + 1 - begin) / 3;
      } else {
        found[SYMBOLS]++;
      }
    }
    found[LETTERS] = letters;
    count_line(text + line, size - line, kinds, found);
    if (breaks) found[REPEATED_LINES] = repeated(text, size, 1, breaks + 1, slots);
    if (blank_lines) found[REPEATED_PARAGRAPHS] = repeated(text, size, 2, breaks + 1, slots);
    found[REPEATED_RUN] = repeated_run(words + first, starts + first, ends + first, count, factors, shares, size, slots);
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

/* The places of the words where a known run of `length` words begins. A run's hash is the sum of its words times `powers`, and the next
   run's follows from it. `first_bits` has a bit for the first bits of every known hash. */
int64_t malmoi_find_runs(const uint64_t *words, int64_t count, const uint64_t *powers, uint64_t inverse, int64_t length,
                         const uint8_t *first_bits, int64_t bits, const uint64_t *known, int64_t known_count, int64_t *places) {
  int64_t found = 0;
  uint64_t run = 0;
  for (int64_t i = 0; i < length && i < count; i++) run += words[i] * powers[i];
  for (int64_t i = 0; i <= count - length; i++) {
    if (i > 0) run = (run - words[i - 1]) * inverse + words[i + length - 1] * powers[length - 1];
    const uint64_t first = run >> (64 - bits);
    if (!(first_bits[first / 8] >> first % 8 & 1)) continue;
    int64_t low = 0, high = known_count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (known[middle] < run) low = middle + 1;
      else high = middle;
    }
    if (low < known_count && known[low] == run) places[found++] = i;
  }
  return found;
}

/* For each text, whether cleaning could change it. `plain` is true for characters that cleaning never changes, and for line breaks. */
int64_t malmoi_may_change(int64_t texts, const uint32_t *codes, const int64_t *begins, const int64_t *sizes, const uint8_t *plain,
                          uint8_t *found) {
  for (int64_t t = 0; t < texts; t++) {
    const uint32_t *text = codes + begins[t];
    uint32_t before = '\n', last = '\n'; /* the beginning is like an empty line */
    uint8_t same = sizes[t] > 0;
    for (int64_t i = 0; i < sizes[t] && same; i++) {
      const uint32_t code = text[i];
      same = code < LAST_CODE && plain[code];
      if (code == ' ') same &= last != ' ' && last != '\n';
      if (code == '\n') same &= last != ' ' && (last != '\n' || before != '\n');
      before = last;
      last = code;
    }
    found[t] = !same || last == ' ' || last == '\n';
  }
  return texts;
}
