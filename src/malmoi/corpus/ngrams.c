/* Hashes of words and n-grams, what the filter counts, and MinHash: the same numbers as ngrams.py, filter.py and duplicates.py compute
   without it. Texts are valid UTF-8: text t is the bytes of `data` from begins[t] to before ends[t]. */

#include <stdint.h>
#include <string.h>

enum { LAST_CODE = 0xFFFF, PLACES = 64, LANES = 16 };

/* SplitMix64's finaliser. */
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/* The character at a place, which moves on to the next; LAST_CODE stands for all beyond the basic plane. */
static inline uint32_t next_code(const uint8_t *data, int64_t *at) {
  const uint8_t *s = data + *at;
  if (s[0] < 0x80) return *at += 1, s[0];
  if (s[0] < 0xE0) return *at += 2, (uint32_t)(s[0] & 0x1F) << 6 | (s[1] & 0x3F);
  if (s[0] < 0xF0) return *at += 3, (uint32_t)(s[0] & 0x0F) << 12 | (uint32_t)(s[1] & 0x3F) << 6 | (s[2] & 0x3F);
  return *at += 4, LAST_CODE;
}

enum { BLOCK = 32 }; /* bytes looked at together */

/* Whether a block is printable ASCII that `malmoi_clean` keeps, at least before the byte that follows it. */
static inline int is_kept(const uint8_t *s) {
  uint8_t others = 0;
  for (int k = 0; k < BLOCK; k++)
    others |= (uint8_t)(s[k] - ' ') > '~' - ' ' | s[k] == '<' | (s[k] == ' ' & (s[k + 1] == ' ' | s[k + 1] == '\n'));
  return !others;
}

static inline int begins_character(uint8_t byte) { return (byte & 0xC0) != 0x80; }

/* The words of the texts: hashes, and starts and ends in characters of their text; lasts[t] is the number of words up to the end of
   text t. `values` is 0 for what is in no word. Returns the number of words. */
int64_t malmoi_hash_words(int64_t texts, const uint8_t *data, const int64_t *begins, const int64_t *ends, const uint64_t *values,
                          const uint64_t *factors, uint64_t *hashes, int64_t *word_starts, int64_t *word_ends, int64_t *lasts) {
  int64_t found = 0;
  for (int64_t t = 0; t < texts; t++) {
    for (int64_t i = begins[t], place = 0; i < ends[t];) {
      uint64_t sum = 0, value = 1;
      const int64_t start = place;
      while (i < ends[t] && (value = values[next_code(data, &i)])) sum += value * factors[(place++ - start) & (PLACES - 1)];
      if (place > start) {
        hashes[found] = mix(sum);
        word_starts[found] = start;
        word_ends[found++] = place;
      }
      place += !value; /* the character after the word */
    }
    lasts[t] = found;
  }
  return found;
}

/* A hash of all words of each text: the polynomial in `base` with their hashes as coefficients. */
int64_t malmoi_hash_texts(int64_t texts, uint64_t base, const uint64_t *words, const int64_t *firsts, const int64_t *lasts, uint64_t *found) {
  for (int64_t t = 0; t < texts; t++) {
    found[t] = 0;
    for (int64_t i = firsts[t]; i < lasts[t]; i++) found[t] = (found[t] + words[i]) * base;
  }
  return texts;
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

static inline uint64_t hash_bytes(const uint8_t *data, int64_t size) {
  uint64_t hash = size, next;
  for (; size > 0; data += 8, size -= 8) {
    next = 0;
    memcpy(&next, data, size < 8 ? size : 8);
    hash = (hash ^ next) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return mix(hash);
}

/* Where the next `breaks` line breaks in a row begin, or `size`. */
static int64_t part_end(const uint8_t *text, int64_t at, int64_t size, int64_t breaks) {
  for (const uint8_t *found; (found = memchr(text + at, '\n', size - at)); at = found - text + 1)
    if (breaks == 1 || (found + 1 < text + size && found[1] == '\n')) return found - text;
  return size;
}

/* Characters in parts of a text that occurred before in it, where `breaks` line breaks separate parts. */
static int64_t repeated(const uint8_t *text, int64_t size, int64_t breaks, int64_t parts, Slot *slots) {
  const int64_t mask = clear(slots, parts);
  int64_t found = 0;
  for (int64_t begin = 0, end; begin <= size; begin = end + breaks) {
    end = part_end(text, begin, size, breaks);
    const int64_t length = end - begin;
    const uint64_t key = hash_bytes(text + begin, length);
    Slot *slot = slots + (key & mask);
    while (slot->count && (slot->key != key || slot->count != length || memcmp(text + slot->first, text + begin, length)))
      slot = slot - slots == mask ? slots : slot + 1;
    if (slot->count)
      for (int64_t i = begin; i < end; i++) found += begins_character(text[i]);
    slot->key = key, slot->first = (int32_t)begin, slot->count = (int32_t)length;
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

enum { LETTER = 1, COUNTED = 2, ELLIPSIS = 4, BULLET = 8, BULLET_BEFORE_SPACE = 16, SPACE = 32 }; /* kinds of characters */
enum { CHARACTERS, WORDS, WORD_CHARACTERS, LETTERS, SPACES, SYMBOLS, LINES, BULLETS, ELLIPSES, REPEATED_LINES, REPEATED_PARAGRAPHS, REPEATED_RUN, COLUMNS };

static void count_line(const uint8_t *line, int64_t size, const uint8_t *kinds, int64_t *found) {
  if (!size) return;
  int64_t second = 0, last = size - 1;
  while (!begins_character(line[last])) last--;
  const uint8_t first = kinds[next_code(line, &second)];
  found[LINES]++;
  found[BULLETS] += first & BULLET || (first & BULLET_BEFORE_SPACE && second < size && line[second] == ' ');
  found[ELLIPSES] += kinds[next_code(line, &last)] & ELLIPSIS || (size > 2 && !memcmp(line + size - 3, "...", 3));
}

/* What the filter counts in each text (`TextStats` in filter.py). Text t has the words from firsts[t] to before lasts[t]; `slots` has room
   for more than the words and the lines of any text. */
int64_t malmoi_text_stats(int64_t texts, const uint8_t *data, const int64_t *begins, const int64_t *ends, const uint64_t *words,
                          const int64_t *word_starts, const int64_t *word_ends, const int64_t *firsts, const int64_t *lasts,
                          const uint8_t *kinds, const uint64_t *factors, const double *shares, Slot *slots, int64_t *found) {
  for (int64_t t = 0; t < texts; t++, found += COLUMNS) {
    const uint8_t *text = data + begins[t];
    const int64_t size = ends[t] - begins[t], first = firsts[t], count = lasts[t] - first;
    int64_t characters = 0, letters = 0, spaces = 0, breaks = 0, blank_lines = 0, line = 0;
    memset(found, 0, COLUMNS * sizeof *found);
    for (int64_t i = first; i < first + count; i++) found[WORD_CHARACTERS] += word_ends[i] - word_starts[i];
    for (int64_t i = 0; i < size; characters++) {
      const int64_t at = i;
      const uint8_t is = kinds[next_code(text, &i)];
      letters += is & LETTER;
      spaces += is / SPACE;
      if (!(is & COUNTED)) continue;
      if (text[at] == '\n') {
        breaks++;
        blank_lines += at > 0 && text[at - 1] == '\n';
        count_line(text + line, at - line, kinds, found);
        line = i;
      } else if (text[at] == '.') { /* three make one ellipsis */
        while (i < size && text[i] == '.') i++;
        characters += i - at - 1;
        found[SYMBOLS] += (i - at) / 3;
      } else {
        found[SYMBOLS]++;
      }
    }
    found[CHARACTERS] = characters;
    found[WORDS] = count;
    found[LETTERS] = letters;
    found[SPACES] = spaces + breaks;
    count_line(text + line, size - line, kinds, found);
    if (breaks) found[REPEATED_LINES] = repeated(text, size, 1, breaks + 1, slots);
    if (blank_lines) found[REPEATED_PARAGRAPHS] = repeated(text, size, 2, breaks + 1, slots);
    found[REPEATED_RUN] = repeated_run(words + first, word_starts + first, word_ends + first, count, factors, shares, characters, slots);
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

/* Cleans the texts of plain characters, which need nothing but their white space normalised: none at either end, else one space or up
   to two line breaks. Other texts are copied as they are, and is_plain[t] is 0. Returns the number of bytes written. */
int64_t malmoi_clean(int64_t texts, const uint8_t *data, const int64_t *begins, const int64_t *ends, const uint8_t *plain, uint8_t *clean,
                     int64_t *clean_ends, int64_t *characters, uint8_t *is_plain) {
  int64_t size = 0;
  for (int64_t t = 0; t < texts; t++) {
    const int64_t begin = begins[t], end = ends[t];
    int64_t found = 0, copied = begin, i = begin, look = begin; /* what is before `copied` is written, and blocks before `look` were looked at */
    uint8_t same = 1;
    while (i < end && same) {
      const int64_t at = i;
      if (data[i] < 0x80 && i >= look && i + BLOCK < end && (i > begin || data[i] != ' ')) {
        look = i + BLOCK;
        if (is_kept(data + i)) {
          i = look;
          found += BLOCK;
          continue;
        }
      }
      const uint32_t code = next_code(data, &i);
      if (code != ' ' && code != '\n') {
        same = plain[code];
        found++;
        continue;
      }
      int64_t breaks = code == '\n';
      for (; i < end && (data[i] == ' ' || data[i] == '\n'); i++) breaks += data[i] == '\n';
      const int64_t wanted = at == begin || i == end ? 0 : breaks > 1 ? 2 : 1;
      found += wanted;
      if (i - at == wanted && (!breaks || breaks == wanted)) continue;
      memcpy(clean + size, data + copied, at - copied);
      size += at - copied;
      memset(clean + size, breaks ? '\n' : ' ', wanted);
      size += wanted;
      copied = i;
    }
    is_plain[t] = same;
    if (!same) size = (t ? clean_ends[t - 1] : 0), copied = begin;
    memcpy(clean + size, data + copied, end - copied);
    clean_ends[t] = size += end - copied;
    characters[t] = found;
  }
  return size;
}
