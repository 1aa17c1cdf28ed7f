/* Cuts UTF-8 text into the words of `_WORD` in cached_encoder.py, and numbers them in the order in which they first appear. */

#include <stdint.h>
#include <string.h>

typedef struct {
  int32_t *slots; /* [mask + 1]: a word's number + 1 at its hash or after; 0: free */
  uint32_t *hashes;
  int64_t *starts; /* word n is bytes[starts[n] : starts[n + 1]] */
  uint8_t *bytes;
  int64_t mask, count, max_words, max_bytes;
} Words;

/* The bytes of the space at p, or 0: Python's \s without \x1c-\x1f. */
static inline int space_at(const uint8_t *p, const uint8_t *end) {
  const uint8_t c = *p;
  if (c == ' ' || (c >= 9 && c <= 13)) return 1;
  if (c < 0xC2 || c > 0xE3) return 0;
  if (c == 0xC2) return end - p > 1 && (p[1] == 0x85 || p[1] == 0xA0) ? 2 : 0;
  if (c < 0xE1 || end - p < 3) return 0;
  if (c == 0xE1) return p[1] == 0x9A && p[2] == 0x80 ? 3 : 0;
  if (c == 0xE3) return p[1] == 0x80 && p[2] == 0x80 ? 3 : 0;
  if (p[1] == 0x81) return p[2] == 0x9F ? 3 : 0;
  return p[1] == 0x80 && (p[2] <= 0x8A || p[2] == 0xA8 || p[2] == 0xA9 || p[2] == 0xAF) ? 3 : 0;
}

static inline int is_plain_space(uint8_t c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/* The bytes of the ASCII letter, digit or Hangul syllable at p, or 0. */
static inline int letter_at(const uint8_t *p, const uint8_t *end) {
  const uint8_t c = *p;
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return 1;
  if (c < 0xEA || c > 0xED || end - p < 3) return 0;
  const uint32_t code = (c & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
  return code >= 0xAC00 && code <= 0xD7A3 ? 3 : 0;
}

static inline int ends_phrase(uint8_t c) {
  return c == '.' || c == ',' || c == '!' || c == '?' || c == ';' || c == ':' || c == '"' || c == '\'' || c == ')';
}

static inline const uint8_t *after_spaces(const uint8_t *p, const uint8_t *end) {
  for (int n; p < end && (n = space_at(p, end)); p += n) {}
  return p;
}

/* No byte inside of a character begins a space, so that bytes are as good as characters here. */
static inline const uint8_t *after_solid(const uint8_t *p, const uint8_t *end) {
  while (p < end && !space_at(p, end)) p++;
  return p;
}

static const uint8_t *word_end(const uint8_t *p, const uint8_t *end) {
  const uint8_t *first = after_spaces(p, end), *q = first;
  if (first == end) return end;
  for (int n; q < end && (n = letter_at(q, end)); q += n) {}
  if (q > first && q < end && ends_phrase(*q)) return q;
  q = after_solid(q, end);
  while (q < end && !is_plain_space(*q)) q = after_solid(after_spaces(q, end), end);
  return q;
}

static inline uint64_t hash_of(const uint8_t *p, int64_t n) {
  uint64_t h = 0x9E3779B97F4A7C15u ^ (uint64_t)n, part;
  for (; n >= 8; p += 8, n -= 8) {
    memcpy(&part, p, 8);
    h = (h ^ part) * 0xFF51AFD7ED558CCDu;
    h ^= h >> 32;
  }
  part = 0;
  memcpy(&part, p, n);
  h = (h ^ part) * 0xC4CEB9FE1A85EC53u;
  return h ^ h >> 29;
}

/* The number of a word, added if it is new; -1: no room. */
static int64_t number_of(Words *w, const uint8_t *p, int64_t n) {
  const uint64_t h = hash_of(p, n);
  const uint32_t mark = (uint32_t)(h >> 32);
  int64_t at = h & w->mask;
  for (; w->slots[at]; at = (at + 1) & w->mask) {
    const int64_t known = w->slots[at] - 1;
    if (w->hashes[known] == mark && w->starts[known + 1] - w->starts[known] == n && !memcmp(w->bytes + w->starts[known], p, n))
      return known;
  }
  const int64_t number = w->count, start = w->starts[number];
  if (number == w->max_words || start + n > w->max_bytes) return -1;
  memcpy(w->bytes + start, p, n);
  w->hashes[number] = mark;
  w->starts[number + 1] = start + n;
  w->slots[at] = (int32_t)(++w->count);
  return number;
}

/* Numbers of the words of `texts` one after another, and how many each has; text i ends at ends[i]. Returns the number of words,
   or -1 if there is no room for the new ones. */
int64_t malmoi_number_words(Words *w, const uint8_t *text, const int64_t *ends, int64_t texts, int32_t *numbers, int64_t *counts) {
  const uint8_t *p = text;
  int64_t found = 0;
  for (int64_t i = 0; i < texts; i++) {
    const uint8_t *end = text + ends[i];
    const int64_t before = found;
    while (p < end) {
      const uint8_t *next = word_end(p, end);
      const int64_t number = number_of(w, p, next - p);
      if (number < 0) return -1;
      numbers[found++] = (int32_t)number;
      p = next;
    }
    counts[i] = found - before;
  }
  return found;
}
