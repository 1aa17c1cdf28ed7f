/* Cuts UTF-8 text into the words of `WORD` in word_cache.py, and gives each the ids that it had when it first appeared. New words of
   ASCII, Hangul and a few signs are encoded here, by merges (byte-level BPE) or as the longest pieces (WordPiece); others are left to
   the caller. No letter, sign or space among those is another in any version of Unicode or changes under NFC. */

#include <stdint.h>
#include <string.h>

enum { LIBRARY, BYTE_BPE, WORDPIECE };
enum { UNKNOWN = -1, NO_ROOM = -1, LONGEST = 100 /* bytes of a word; BERT's limit in characters */ };

typedef struct {
  uint64_t *slots; /* [mask + 1]: half of its hash and a string's number + 1, at its hash or after; 0: free */
  int64_t *starts; /* string n is bytes[starts[n] : starts[n + 1]] */
  uint8_t *bytes;
  int64_t mask, count, max_count, max_bytes; /* mask + 1 slots of room for twice the most strings; at first 1 */
} Strings;

typedef struct {
  Strings words;
  int64_t *places; /* word n is ids[places[n] : places[n] + sizes[n]]; sizes[n] is UNKNOWN until it is encoded */
  int32_t *sizes, *ids;
  int64_t used, max_ids;
  int64_t kind, lowercase, hangul; /* hangul: whether syllables stay whole */
  const int32_t *letters;          /* BPE: the ids of the bytes; WordPiece: of the pieces by number, then of the unknown word */
  const int32_t *merges;           /* BPE: [rank][3]: left, right, both */
  int32_t *pairs;                  /* [pair_mask + 1]: a pair's rank + 1 at its hash or after; 0: free */
  int64_t pair_mask;
  Strings pieces; /* WordPiece: the vocabulary */
} Cache;

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

static inline uint64_t eight_at(const uint8_t *p) {
  uint64_t found;
  memcpy(&found, p, 8);
  return found;
}

/* Up to eight bytes as a number; strings of one length have the same only if they are the same. A call of memcpy takes longer. */
static inline uint64_t few_at(const uint8_t *p, int64_t n) {
  uint32_t first, last;
  if (n < 4) return n ? p[0] | (uint64_t)p[n / 2] << 8 | (uint64_t)p[n - 1] << 16 : 0;
  memcpy(&first, p, 4);
  memcpy(&last, p + n - 4, 4);
  return first | (uint64_t)last << 32;
}

static inline int is_same(const uint8_t *p, const uint8_t *q, int64_t n) {
  if (n <= 8) return few_at(p, n) == few_at(q, n);
  if (n <= 16) return eight_at(p) == eight_at(q) && eight_at(p + n - 8) == eight_at(q + n - 8);
  return !memcmp(p, q, n);
}

static inline uint64_t hash_of(const uint8_t *p, int64_t n) {
  uint64_t h = 0x9E3779B97F4A7C15u ^ (uint64_t)n;
  for (; n > 8; p += 8, n -= 8) {
    h = (h ^ eight_at(p)) * 0xFF51AFD7ED558CCDu;
    h ^= h >> 32;
  }
  h = (h ^ few_at(p, n)) * 0xC4CEB9FE1A85EC53u;
  return h ^ h >> 29;
}

/* Spreads the strings over twice the slots: few strings stay in the processor's cache. */
static void grow(Strings *s) {
  s->mask = 2 * s->mask + 1;
  memset(s->slots, 0, (s->mask + 1) * sizeof *s->slots);
  for (int64_t i = 0; i < s->count; i++) {
    const uint64_t h = hash_of(s->bytes + s->starts[i], s->starts[i + 1] - s->starts[i]);
    int64_t at = h & s->mask;
    while (s->slots[at]) at = (at + 1) & s->mask;
    s->slots[at] = h >> 32 << 32 | (uint64_t)(i + 1);
  }
}

/* The number of a string, added if it is new and `add`; -1: it is not there, or there is no room. */
static int64_t number_of(Strings *s, const uint8_t *p, int64_t n, int add) {
  const uint64_t h = hash_of(p, n);
  const uint32_t mark = (uint32_t)(h >> 32);
  int64_t at = h & s->mask;
  for (; s->slots[at]; at = (at + 1) & s->mask) {
    if ((uint32_t)(s->slots[at] >> 32) != mark) continue;
    const int64_t known = (int64_t)(uint32_t)s->slots[at] - 1;
    if (s->starts[known + 1] - s->starts[known] == n && is_same(s->bytes + s->starts[known], p, n)) return known;
  }
  const int64_t number = s->count, start = s->starts[number];
  if (!add || number == s->max_count || start + n > s->max_bytes) return -1;
  memcpy(s->bytes + start, p, n);
  s->starts[number + 1] = start + n;
  s->slots[at] = (uint64_t)mark << 32 | (uint64_t)(++s->count);
  if (2 * s->count > s->mask) grow(s);
  return number;
}

/* ------------------------------------------------------------------ new words */

enum { STRANGE, LETTER, DIGIT, SIGN, SPACE }; /* SPACE: of any kind */

static inline int is_digit(uint8_t c) { return c >= '0' && c <= '9'; }

/* What the character at p is, and its bytes in *n: of those beyond ASCII Hangul, its single letters (ㅋ), dashes, quotes, brackets
   and a few other signs are known here. */
static inline int class_at(const uint8_t *p, const uint8_t *end, int *n) {
  if ((*n = letter_at(p, end))) return is_digit(*p) ? DIGIT : LETTER;
  *n = 1;
  if (is_plain_space(*p)) return SPACE;
  if (*p < 128) return *p > ' ' && *p < 127 ? SIGN : STRANGE;
  if (*p == 0xC2 && end - p > 1 && p[1] == 0xB7) return *n = 2, SIGN; /* · */
  if ((*p & 0xF0) != 0xE0 || end - p < 3) return STRANGE;
  *n = 3;
  const uint32_t code = (*p & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
  if (code >= 0x3131 && code <= 0x318E) return code == 0x3164 ? STRANGE : LETTER; /* but not the one that is blank */
  const int is_sign = (code >= 0x2010 && code <= 0x2027) || (code >= 0x3008 && code <= 0x3011) || code == 0xFF1F;
  return is_sign ? SIGN : STRANGE;
}

static const uint8_t *after_class(const uint8_t *p, const uint8_t *end, int class) {
  for (int n; p < end && class_at(p, end, &n) == class; p += n) {}
  return p;
}

/* The end of "'s" and its like at p, or p. */
static const uint8_t *after_contraction(const uint8_t *p, const uint8_t *end) {
  if (*p != '\'' || end - p < 2) return p;
  if (strchr("stmd", p[1])) return p + 2;
  const int two = end - p > 2 && (!memcmp(p + 1, "re", 2) || !memcmp(p + 1, "ve", 2) || !memcmp(p + 1, "ll", 2));
  return two ? p + 3 : p;
}

/* The end of what GPT-2's pattern matches at p:
   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static const uint8_t *after_gpt2_token(const uint8_t *p, const uint8_t *end) {
  const uint8_t *q = after_contraction(p, end);
  if (q > p) return q;
  int n;
  q = *p == ' ' && p + 1 < end ? p + 1 : p;
  const int class = class_at(q, end, &n);
  if (class != SPACE) return after_class(q, end, class);
  q = after_class(p, end, SPACE);
  return q == end || q - p == 1 ? q : q - 1;
}

static inline int64_t pair_slot(const Cache *c, int32_t left, int32_t right) {
  const uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
  int64_t at = (h ^ h >> 32) & c->pair_mask;
  for (; c->pairs[at]; at = (at + 1) & c->pair_mask) {
    const int32_t *merge = c->merges + 3 * (c->pairs[at] - 1);
    if (merge[0] == left && merge[1] == right) break;
  }
  return at;
}

static inline int32_t rank_of(const Cache *c, int32_t left, int32_t right) {
  return (int32_t)((uint32_t)(c->pairs[pair_slot(c, left, right)] - 1) & INT32_MAX); /* no pair: the last rank of all */
}

/* Merges the pair of the lowest rank, the leftmost first, until there is none. Returns the number of ids. */
static int64_t merge_bytes(const Cache *c, const uint8_t *p, int64_t n, int32_t *ids) {
  int32_t ranks[LONGEST];
  for (int64_t i = 0; i < n; i++) ids[i] = c->letters[p[i]];
  for (int64_t i = 0; i + 1 < n; i++) ranks[i] = rank_of(c, ids[i], ids[i + 1]);
  for (;;) {
    int64_t best = 0;
    for (int64_t i = 1; i + 1 < n; i++)
      if (ranks[i] < ranks[best]) best = i;
    if (n < 2 || ranks[best] == INT32_MAX) return n;
    ids[best] = c->merges[3 * ranks[best] + 2];
    n--;
    memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
    memmove(ranks + best, ranks + best + 1, (n - best - 1) * sizeof *ranks);
    if (best) ranks[best - 1] = rank_of(c, ids[best - 1], ids[best]);
    if (best + 1 < n) ranks[best] = rank_of(c, ids[best], ids[best + 1]);
  }
}

/* The longest piece at each place, or the unknown word. Returns the number of ids. */
static int64_t longest_pieces(Cache *c, const uint8_t *p, int64_t n, int32_t *ids) {
  uint8_t piece[LONGEST + 2] = "##";
  int64_t count = 0;
  for (int64_t at = 0; at < n;) {
    const int64_t prefix = at ? 2 : 0;
    int64_t number = -1, size = n - at;
    memcpy(piece + 2, p + at, size);
    while (size && (number = number_of(&c->pieces, piece + 2 - prefix, prefix + size, 0)) < 0)
      for (size--; size && (p[at + size] & 0xC0) == 0x80; size--) {} /* to the start of a character */
    ids[count++] = c->letters[number < 0 ? c->pieces.count : number];
    if (number < 0) {
      ids[0] = ids[count - 1];
      return 1;
    }
    at += size;
  }
  return count;
}

/* Encodes a word between spaces as BERT does, letters and digits together and every sign alone. Returns the number of ids. */
static int64_t wordpieces(Cache *c, const uint8_t *p, const uint8_t *end, int32_t *ids) {
  int64_t count = 0;
  for (int n; p < end;) {
    const int class = class_at(p, end, &n);
    const uint8_t *q = p + n;
    if (class == LETTER || class == DIGIT)
      for (int next; q < end && ((next = class_at(q, end, &n)) == LETTER || next == DIGIT); q += n) {}
    if (class != SPACE) count += longest_pieces(c, p, q - p, ids + count);
    p = q;
  }
  return count;
}

static int64_t byte_merges(const Cache *c, const uint8_t *p, const uint8_t *end, int32_t *ids) {
  int64_t count = 0;
  for (const uint8_t *q; p < end; p = q) {
    q = after_gpt2_token(p, end);
    count += merge_bytes(c, p, q - p, ids + count);
  }
  return count;
}

static int is_plain(const Cache *c, const uint8_t *p, const uint8_t *end) {
  for (int n; p < end; p += n)
    if (class_at(p, end, &n) == STRANGE || (n == 3 && !c->hangul && letter_at(p, end))) return 0;
  return 1;
}

/* The ids of a new word, written to the end of all ids; UNKNOWN if it is not for this file to encode. */
static int32_t encode_word(Cache *c, const uint8_t *p, int64_t n) {
  uint8_t word[LONGEST];
  if (c->kind == LIBRARY || n > LONGEST || c->used + n > c->max_ids || !is_plain(c, p, p + n)) return UNKNOWN;
  for (int64_t i = 0; i < n; i++) word[i] = c->lowercase && p[i] >= 'A' && p[i] <= 'Z' ? p[i] + 32 : p[i];
  int32_t *ids = c->ids + c->used;
  return (int32_t)(c->kind == BYTE_BPE ? byte_merges(c, word, word + n, ids) : wordpieces(c, word, word + n, ids));
}

/* Fills the tables of a vocabulary: of `merges` pairs, of which two alike keep the last, and of `count` pieces; piece i ends at
   ends[i]. Returns the number of pieces. */
int64_t malmoi_learn_vocabulary(Cache *c, int64_t merges, const uint8_t *text, const int64_t *ends, int64_t count) {
  for (int64_t rank = 0; rank < merges; rank++) {
    const int32_t *merge = c->merges + 3 * rank;
    c->pairs[pair_slot(c, merge[0], merge[1])] = (int32_t)rank + 1;
  }
  for (int64_t i = 0, start = 0; i < count; start = ends[i++]) number_of(&c->pieces, text + start, ends[i] - start, 1);
  return c->pieces.count;
}

/* Numbers of the words of `texts` one after another, and how many each has; text i ends at ends[i]. Returns the number of words,
   or NO_ROOM for the new ones. */
int64_t malmoi_number_words(Cache *c, const uint8_t *text, const int64_t *ends, int64_t texts, int32_t *numbers, int64_t *counts) {
  const uint8_t *p = text;
  int64_t found = 0;
  for (int64_t i = 0; i < texts; i++) {
    const uint8_t *end = text + ends[i];
    const int64_t before = found;
    while (p < end) {
      const uint8_t *next = word_end(p, end);
      const int64_t known = c->words.count, number = number_of(&c->words, p, next - p, 1);
      if (number < 0) return NO_ROOM;
      if (number == known) {
        c->places[number] = c->used;
        c->sizes[number] = encode_word(c, p, next - p);
        if (c->sizes[number] > 0) c->used += c->sizes[number];
      }
      numbers[found++] = (int32_t)number;
      p = next;
    }
    counts[i] = found - before;
  }
  return found;
}

/* The ids of numbered words one after another, and in place of the number of words of each text that of its ids. Returns how many
   there are. */
int64_t malmoi_gather_ids(const Cache *c, const int32_t *numbers, int64_t *counts, int64_t texts, int32_t *out) {
  int32_t *at = out;
  for (int64_t i = 0; i < texts; i++) {
    const int32_t *start = at;
    for (const int32_t *last = numbers + counts[i]; numbers < last; numbers++) {
      const int32_t *ids = c->ids + c->places[*numbers], size = c->sizes[*numbers];
      for (int32_t k = 0; k < size; k++) *at++ = ids[k];
    }
    counts[i] = at - start;
  }
  return at - out;
}
