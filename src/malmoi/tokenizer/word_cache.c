/* Cuts UTF-8 text into the words of `WORD` in word_cache.py, and gives each the ids that it had when it first appeared. New words of
   ASCII, Latin-1's letters, Hangul and some signs are encoded here, by merges (byte-level BPE) or as the longest pieces (WordPiece);
   others are left to the caller. No letter, sign or space among those is another in any version of Unicode or changes under NFC.
   Texts are followed by PADDING bytes, so that every word can be read 16 bytes at a time. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LIBRARY, BYTE_BPE, WORDPIECE };
enum { UNKNOWN = -1, NO_ROOM = -1, LONGEST = 500 /* bytes of a word that is encoded here */, LONGEST_PIECED = 100 /* BERT's characters */ };
enum { INLINE = 16 /* bytes */, LONG = INLINE + 1, PADDING = 16, IDS_INLINE = 2 };

/* A string, and what is known of it: half a line of the processor's cache. */
typedef struct {
  uint64_t first, last; /* its bytes; if it is LONG: its hash, and its number */
  uint32_t place;       /* of more ids than IDS_INLINE */
  uint32_t size : 26, length : 6; /* of ids; of bytes, or LONG, or 0: the slot is free */
  int32_t ids[IDS_INLINE];        /* of word n that is not encoded yet: ~n */
} Slot;

typedef struct {
  Slot *slots;     /* [mask + 1]: a string stands at its hash or after */
  int64_t *starts; /* string n is bytes[starts[n] : starts[n + 1]] */
  uint8_t *bytes;
  int64_t mask, count, max_count, max_bytes; /* mask + 1 slots of room for twice the most strings; at first 2 */
} Strings;

typedef struct {
  int64_t kind, lowercase, whole; /* whole: whether syllables and letters with accents stay whole */
  const int32_t *ids;             /* of the pieces by number, then of the bytes (BPE) or of the unknown word (WordPiece) */
  int32_t *merged;                /* BPE: what the pair of a rank becomes */
  uint64_t *pairs;                /* [pair_mask + 1][PAIRS]: pairs with their rank + 1, at their hash or after; 0: free */
  uint32_t *first_keys;           /* [256][256]: the keys of pairs of bytes */
  int64_t pair_mask, longest;     /* longest: bytes of a piece */
  Strings pieces;                 /* the vocabulary */
} Vocabulary;

typedef struct {
  Strings words;
  const Vocabulary *vocabulary;
  int32_t *ids;
  int64_t used, max_ids;
  int64_t left_out; /* words of the last texts that stand as ~n among their ids */
  int64_t widest;   /* the most ids that a word has for each of its bytes, rounded up */
} Cache;

/* ------------------------------------------------------------------ words */

enum { IN_WORD = 1, ENDS_PHRASE = 2, PLAIN_SPACE = 4, OTHER_SPACE = 8, BEGINS_SPACE = 16, BEGINS_SYLLABLE = 32, IS_SYLLABLE = 64 };

static const uint8_t kinds[256] = {
  ['0' ... '9'] = IN_WORD, ['A' ... 'Z'] = IN_WORD, ['a' ... 'z'] = IN_WORD,
  ['.'] = ENDS_PHRASE, [','] = ENDS_PHRASE, ['!'] = ENDS_PHRASE, ['?'] = ENDS_PHRASE, [';'] = ENDS_PHRASE, [':'] = ENDS_PHRASE,
  ['"'] = ENDS_PHRASE, ['\''] = ENDS_PHRASE, [')'] = ENDS_PHRASE,
  [' '] = PLAIN_SPACE, ['\t'] = PLAIN_SPACE, ['\n'] = PLAIN_SPACE, ['\r'] = PLAIN_SPACE, [11] = OTHER_SPACE, [12] = OTHER_SPACE,
  [0xC2] = BEGINS_SPACE, [0xE1 ... 0xE3] = BEGINS_SPACE,
  [0xEA] = BEGINS_SYLLABLE, [0xED] = BEGINS_SYLLABLE, [0xEB ... 0xEC] = IS_SYLLABLE, /* which U+B000 to U+CFFF all are */
};

/* The bytes of the space at p, or 0: Python's \s without \x1c-\x1f. */
static inline int space_at(const uint8_t *p, const uint8_t *end) {
  const uint8_t c = *p, kind = kinds[c];
  if (kind & (PLAIN_SPACE | OTHER_SPACE)) return 1;
  if (!(kind & BEGINS_SPACE)) return 0;
  if (c == 0xC2) return end - p > 1 && (p[1] == 0x85 || p[1] == 0xA0) ? 2 : 0;
  if (end - p < 3) return 0;
  if (c == 0xE1) return p[1] == 0x9A && p[2] == 0x80 ? 3 : 0;
  if (c == 0xE3) return p[1] == 0x80 && p[2] == 0x80 ? 3 : 0;
  if (p[1] == 0x81) return p[2] == 0x9F ? 3 : 0;
  return p[1] == 0x80 && (p[2] <= 0x8A || p[2] == 0xA8 || p[2] == 0xA9 || p[2] == 0xAF) ? 3 : 0;
}

static inline int is_plain_space(uint8_t c) { return kinds[c] & PLAIN_SPACE; }

static inline uint32_t code_at(const uint8_t *p) { return (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u); }

/* The bytes of the ASCII letter, digit or Hangul syllable at p, or 0. */
static inline int letter_at(const uint8_t *p, const uint8_t *end) {
  const uint8_t kind = kinds[*p];
  if (kind & IN_WORD) return 1;
  if (!(kind & (BEGINS_SYLLABLE | IS_SYLLABLE)) || end - p < 3) return 0;
  return kind & IS_SYLLABLE || (code_at(p) >= 0xAC00 && code_at(p) <= 0xD7A3) ? 3 : 0;
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

/* After the ASCII letters and digits at p, of which eight are looked at together where the first byte is the lowest of a number. */
static inline const uint8_t *after_ascii(const uint8_t *p) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const uint64_t ones = UINT64_MAX / 255, high = 128 * ones;
  for (;; p += 8) {
    uint64_t eight;
    memcpy(&eight, p, 8);
    const uint64_t low = eight & ~high, small = low | 32 * ones; /* a byte is beyond a limit if its highest bit is set then: */
    const uint64_t letters = (small + (128 - 'a') * ones) & ~(small + (127 - 'z') * ones);
    const uint64_t digits = (low + (128 - '0') * ones) & ~(low + (127 - '9') * ones);
    const uint64_t others = (~(letters | digits) | eight) & high;
    if (others) return p + __builtin_ctzll(others) / 8;
  }
#else
  while (kinds[*p] & IN_WORD) p++;
  return p;
#endif
}

static inline const uint8_t *word_end(const uint8_t *p, const uint8_t *end) {
  const uint8_t *first = p + (*p == ' ');
  if (kinds[*first] & (PLAIN_SPACE | OTHER_SPACE | BEGINS_SPACE)) first = after_spaces(p, end);
  if (first >= end) return end;
  const uint8_t *q = after_ascii(first);
  if (q > end) q = end;
  for (int n; q < end && (n = letter_at(q, end)); q += n) {}
  if (q > first && q < end && kinds[*q] & (ENDS_PHRASE | PLAIN_SPACE)) return q;
  q = after_solid(q, end);
  while (q < end && !is_plain_space(*q)) q = after_solid(after_spaces(q, end), end);
  return q;
}

/* The end of n characters from p. */
static const uint8_t *after_characters(const uint8_t *p, int64_t n) {
  while (n) {
    int64_t inside = 0; /* bytes that begin no character */
    for (int64_t i = 0; i < n; i++) inside += (p[i] & 0xC0) == 0x80;
    p += n;
    n = inside;
  }
  while ((*p & 0xC0) == 0x80) p++;
  return p;
}

/* ------------------------------------------------------------------ strings */

typedef struct {
  const uint8_t *p; /* NULL: here a text ends */
  int64_t n;
  uint64_t first, last, hash; /* as in a slot */
} Key;

static inline uint64_t mixed(uint64_t first, uint64_t last, uint64_t n) {
  uint64_t h = (first ^ n * 0x9E3779B97F4A7C15u) * 0xFF51AFD7ED558CCDu;
  h ^= h >> 32;
  h = (h ^ last) * 0xC4CEB9FE1A85EC53u;
  return h ^ h >> 29;
}

static inline void read_sixteen(const uint8_t *p, uint64_t *first, uint64_t *last) {
  memcpy(first, p, 8);
  memcpy(last, p + 8, 8);
}

static inline uint64_t long_hash(const uint8_t *p, int64_t n) {
  uint64_t h = 0, first, last;
  for (int64_t i = 0; i + 16 <= n; i += 16) {
    read_sixteen(p + i, &first, &last);
    h = mixed(h ^ first, last, (uint64_t)n);
  }
  read_sixteen(p + n - 16, &first, &last);
  return mixed(h ^ first, last, (uint64_t)n);
}

static inline Key key_of(const uint8_t *p, int64_t n) {
  static const uint8_t ones[2 * INLINE] = {[0 ... INLINE - 1] = 255}; /* ones + INLINE - n: n bytes of them */
  Key k = {p, n, 0, 0, 0};
  if (n <= INLINE) {
    uint64_t first, last;
    read_sixteen(p, &k.first, &k.last);
    read_sixteen(ones + INLINE - n, &first, &last);
    k.first &= first;
    k.last &= last;
    k.hash = mixed(k.first, k.last, (uint64_t)n);
  } else {
    k.hash = k.first = long_hash(p, n);
  }
  return k;
}

static inline uint64_t hash_in(const Slot *s) { return s->length == LONG ? s->first : mixed(s->first, s->last, s->length); }

/* The slot of a string, or the free one where it belongs. */
static inline Slot *slot_of(const Strings *s, const Key *k) {
  const uint32_t length = k->n <= INLINE ? (uint32_t)k->n : LONG;
  for (uint64_t at = k->hash;; at++) {
    Slot *slot = s->slots + (at & (uint64_t)s->mask);
    if (slot->first == k->first && slot->length == length) {
      if (length != LONG && slot->last == k->last) return slot;
      if (length == LONG) {
        const int64_t start = s->starts[slot->last];
        if (s->starts[slot->last + 1] - start == k->n && !memcmp(s->bytes + start, k->p, k->n)) return slot;
      }
    }
    if (!slot->length) return slot;
  }
}

/* Spreads the strings over twice the slots: few strings stay in the processor's cache. Returns whether there was memory. */
static int grow(Strings *s) {
  const size_t size = (s->mask + 1) * sizeof *s->slots;
  Slot *old = malloc(size);
  if (!old) return 0;
  memcpy(old, s->slots, size);
  s->mask = 2 * s->mask + 1;
  memset(s->slots, 0, 2 * size);
  for (int64_t i = 0; i <= s->mask / 2; i++) {
    uint64_t at = hash_in(old + i);
    if (!old[i].length) continue;
    while (s->slots[at & (uint64_t)s->mask].length) at++;
    s->slots[at & (uint64_t)s->mask] = old[i];
  }
  free(old);
  return 1;
}

/* The slot of a new string, whose number is its only id so far, as ~number; NULL: there is no room. */
static Slot *added(Strings *s, const Key *k) {
  const int64_t number = s->count, start = s->starts[number];
  if (number == s->max_count || start + k->n > s->max_bytes) return NULL;
  if (2 * (number + 1) > s->mask + 1 && !grow(s)) return NULL;
  memcpy(s->bytes + start, k->p, k->n);
  s->starts[++s->count] = start + k->n;
  Slot *slot = slot_of(s, k);
  const int is_long = k->n > INLINE;
  *slot = (Slot){k->first, is_long ? (uint64_t)number : k->last, 0, 1, is_long ? LONG : (uint32_t)k->n, {(int32_t)~number}};
  return slot;
}

/* Gives a string ids that stand at ids + place. */
static inline void set_ids(Slot *slot, const int32_t *ids, int64_t place, int64_t size) {
  slot->place = (uint32_t)place;
  slot->size = (uint32_t)size;
  slot->ids[0] = 0; /* no word that is left out */
  for (int64_t i = 0; i < size && i < IDS_INLINE; i++) slot->ids[i] = ids[place + i];
}

/* ------------------------------------------------------------------ new words */

enum { STRANGE, LETTER, DIGIT, SIGN, SPACE, SYMBOL }; /* SPACE: of any kind; SYMBOL: a sign for GPT-2, as good as a letter for BERT */

/* What the character at p is, and its bytes in *n: of those beyond ASCII Hangul, its single letters (ㅋ), Latin-1's letters, dashes,
   quotes, brackets, shapes (♥) and a few other signs are known here. */
static inline int class_at(const Vocabulary *v, const uint8_t *p, const uint8_t *end, int *n) {
  const uint8_t c = *p;
  *n = 1;
  if (c < 128) {
    if (kinds[c] & IN_WORD) return c <= '9' ? DIGIT : LETTER;
    return is_plain_space(c) ? SPACE : c > ' ' && c < 127 ? SIGN : STRANGE;
  }
  if (end - p < 2) return STRANGE;
  *n = 2;
  if (c == 0xC2) return p[1] == 0xB7 ? SIGN : STRANGE;                                     /* · */
  if (c == 0xC3) return v->whole && p[1] != 0x97 && p[1] != 0xB7 ? LETTER : STRANGE; /* but not × and ÷ */
  if ((c & 0xF0) != 0xE0 || end - p < 3) return STRANGE;
  *n = 3;
  const uint32_t code = code_at(p);
  if (code >= 0xAC00 && code <= 0xD7A3) return v->whole ? LETTER : STRANGE;
  if (code >= 0x3131 && code <= 0x318E) return code == 0x3164 ? STRANGE : LETTER; /* but not the one that is blank */
  if (code >= 0x2500 && code <= 0x26FF) return SYMBOL;
  const int is_sign = (code >= 0x2010 && code <= 0x2027) || (code >= 0x3001 && code <= 0x3002) || (code >= 0x3008 && code <= 0x3011);
  return is_sign || code == 0xFF01 || code == 0xFF1F ? SIGN : STRANGE;
}

/* Copies a word, in lower case if wanted, with the class of the character of each byte. Returns whether it is for this file. */
static int read_word(const Vocabulary *v, const uint8_t *p, int64_t size, uint8_t *word, uint8_t *classes) {
  const uint8_t *end = p + size;
  for (int n; p < end; p += n) {
    int class = class_at(v, p, end, &n);
    if (class == STRANGE) return 0;
    if (class == SYMBOL) class = v->kind == BYTE_BPE ? SIGN : LETTER;
    for (int i = 0; i < n; i++) *word++ = p[i], *classes++ = (uint8_t)class;
    if (!v->lowercase) continue;
    const int capital = n == 1 ? *p >= 'A' && *p <= 'Z' : *p == 0xC3 && p[1] <= 0x9E;
    if (capital) word[-1] += 32;
  }
  return 1;
}

static inline int64_t after_class(const uint8_t *classes, int64_t at, int64_t n) {
  const uint8_t class = classes[at];
  while (at < n && classes[at] == class) at++;
  return at;
}

/* The end of "'s" and its like at p, or p. */
static const uint8_t *after_contraction(const uint8_t *p, const uint8_t *end) {
  if (*p != '\'' || end - p < 2) return p;
  if (p[1] == 's' || p[1] == 't' || p[1] == 'm' || p[1] == 'd') return p + 2;
  const int two = end - p > 2 && (!memcmp(p + 1, "re", 2) || !memcmp(p + 1, "ve", 2) || !memcmp(p + 1, "ll", 2));
  return two ? p + 3 : p;
}

/* The end of what GPT-2's pattern matches at this place:
   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static int64_t after_gpt2_token(const uint8_t *word, const uint8_t *classes, int64_t at, int64_t n) {
  const int64_t contracted = after_contraction(word + at, word + n) - word;
  if (contracted > at) return contracted;
  const int64_t first = word[at] == ' ' && at + 1 < n ? at + 1 : at;
  if (classes[first] != SPACE) return after_class(classes, first, n);
  const int64_t end = after_class(classes, at, n);
  return end == n || end - at == 1 ? end : end - 1;
}

/* Two ids with their rank + 1 in a number, so that one comparison finds a pair. */
enum { ID_BITS = 21, NOBODY = (1 << ID_BITS) - 1, RANK_BITS = 22, PAIRS = 4 /* beside each other, half a line of the cache */ };

static inline uint64_t pair_of(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << ID_BITS | (uint32_t)right; }

static inline int64_t pair_place(const Vocabulary *v, uint64_t pair) {
  const uint64_t h = pair * 0x9E3779B97F4A7C15u;
  return (int64_t)((h ^ h >> 32) & (uint64_t)v->pair_mask);
}

/* What the pair of the lowest rank, the leftmost first, is the least of: rank and place. Above all: no pair. */
enum { PLACE_BITS = 9, LANES = 16 };
static const uint32_t NO_PAIR = UINT32_MAX << PLACE_BITS;

/* The rank of a pair as a key. */
static inline uint32_t key_of_pair(const Vocabulary *v, int32_t left, int32_t right) {
  const uint64_t pair = pair_of(left, right);
  for (int64_t place = pair_place(v, pair);; place = (place + 1) & v->pair_mask) {
    const uint64_t *some = v->pairs + PAIRS * place;
    uint64_t found = 0;
    for (int i = 0; i < PAIRS; i++) found |= some[i] >> RANK_BITS == pair ? some[i] : 0;
    if (!some[PAIRS - 1] || found) return ((uint32_t)(found & ((1u << RANK_BITS) - 1)) - 1) << PLACE_BITS;
  }
}

static void add_pair(const Vocabulary *v, int32_t left, int32_t right, uint64_t rank) {
  const uint64_t pair = pair_of(left, right);
  int64_t at = PAIRS * pair_place(v, pair);
  while (v->pairs[at] && v->pairs[at] >> RANK_BITS != pair) at = (at + 1) & (PAIRS * (v->pair_mask + 1) - 1);
  v->pairs[at] = pair << RANK_BITS | (rank + 1);
}

static inline uint32_t least_of(const uint32_t *keys) {
  uint32_t half[LANES / 2], quarter[LANES / 4];
  for (int k = 0; k < LANES / 2; k++) half[k] = keys[k] < keys[k + LANES / 2] ? keys[k] : keys[k + LANES / 2];
  for (int k = 0; k < LANES / 4; k++) quarter[k] = half[k] < half[k + LANES / 4] ? half[k] : half[k + LANES / 4];
  const uint32_t one = quarter[0] < quarter[1] ? quarter[0] : quarter[1], other = quarter[2] < quarter[3] ? quarter[2] : quarter[3];
  return one < other ? one : other;
}

/* Merges the pair of the lowest rank, the leftmost first, until there is none; `few`: of at most LANES bytes, whose keys stay in
   registers. Some bytes after p can be read. Returns the number of ids. */
static inline __attribute__((always_inline)) int64_t merge(const Vocabulary *v, const uint8_t *p, int64_t n, int32_t *ids, int few) {
  uint32_t keys[LONGEST + LANES + 1];
  int32_t parts[LONGEST + LANES + 1]; /* before the first and after the last stands NOBODY */
  uint16_t next[LONGEST + LANES + 1], before[LONGEST + LANES + 1];
  const int lanes = few ? LANES : (int)((n + LANES - 1) / LANES * LANES);
  const int32_t *letters = v->ids + v->pieces.count;
  for (int i = 0; i < lanes; i++) {
    const uint32_t key = v->first_keys[p[i] << 8 | p[i + 1]] | (uint32_t)i;
    keys[i] = i + 1 < (int)n ? key : NO_PAIR;
    parts[i] = i < (int)n ? letters[p[i]] : NOBODY;
    next[i] = (uint16_t)(i + 1);
    before[i] = (uint16_t)(i - 1);
  }
  parts[lanes] = NOBODY;
  before[0] = (uint16_t)lanes;
  for (;;) {
    uint32_t least = least_of(keys);
    for (int k = LANES; k < lanes; k += LANES) {
      const uint32_t other = least_of(keys + k);
      least = other < least ? other : least;
    }
    if (least >= NO_PAIR) break;
    const int i = least & ((1 << PLACE_BITS) - 1), right = next[i], after = next[right], left = before[i];
    const int32_t both = v->merged[least >> PLACE_BITS];
    const uint32_t ahead = key_of_pair(v, both, parts[after]) | (uint32_t)i;
    const uint32_t behind = key_of_pair(v, parts[left], both) | (uint32_t)left;
    parts[i] = both;
    next[i] = (uint16_t)after;
    before[after] = (uint16_t)i;
    if (few) {
      for (int k = 0; k < LANES; k++) {
        const uint32_t key = k == right ? NO_PAIR : keys[k], other = k == left ? behind : key;
        keys[k] = k == i ? ahead : other;
      }
    } else {
      keys[right] = NO_PAIR;
      keys[i] = ahead;
      keys[left] = behind;
    }
  }
  int64_t count = 0;
  for (int i = 0; i < (int)n; i = next[i]) ids[count++] = parts[i];
  return count;
}

static int64_t merge_few(const Vocabulary *v, const uint8_t *p, int64_t n, int32_t *ids) { return merge(v, p, n, ids, 1); }
static int64_t merge_many(const Vocabulary *v, const uint8_t *p, int64_t n, int32_t *ids) { return merge(v, p, n, ids, 0); }

static int64_t byte_merges(const Vocabulary *v, const uint8_t *word, const uint8_t *classes, int64_t n, int32_t *ids) {
  int64_t count = 0;
  for (int64_t at = 0, end; at < n; at = end) {
    end = after_gpt2_token(word, classes, at, n);
    count += (end - at <= LANES ? merge_few : merge_many)(v, word + at, end - at, ids + count);
  }
  return count;
}

static inline int is_inside(uint8_t c) { return (c & 0xC0) == 0x80; } /* of a character */

/* The longest piece at each place, or the unknown word. Returns the number of ids. */
static int64_t longest_pieces(const Vocabulary *v, const uint8_t *p, int64_t n, int32_t *ids) {
  uint8_t piece[LONGEST + 2 + PADDING] = "##";
  int64_t count = 0, characters = 0;
  for (int64_t i = 0; i < n; i++) characters += !is_inside(p[i]);
  for (int64_t at = 0; at < n;) {
    const int64_t prefix = at ? 2 : 0, most = v->longest - prefix;
    int64_t size = characters > LONGEST_PIECED ? 0 : n - at < most ? n - at : most;
    const Slot *found = NULL;
    memcpy(piece + 2, p + at, n - at);
    for (; size > 0; size--) {
      if (at + size < n && is_inside(p[at + size])) continue;
      const Key k = key_of(piece + 2 - prefix, prefix + size);
      found = slot_of(&v->pieces, &k);
      if (found->length) break;
    }
    if (size <= 0) {
      ids[0] = v->ids[v->pieces.count];
      return 1;
    }
    ids[count++] = v->ids[~found->ids[0]];
    at += size;
  }
  return count;
}

/* Encodes a word between spaces as BERT does, letters and digits together and every sign alone. Returns the number of ids. */
static int64_t wordpieces(const Vocabulary *v, const uint8_t *word, const uint8_t *classes, int64_t n, int32_t *ids) {
  int64_t count = 0;
  for (int64_t at = 0, end; at < n; at = end) {
    const int class = classes[at];
    end = at + 1;
    if (class == SIGN)
      while (end < n && is_inside(word[end])) end++;
    if (class == LETTER || class == DIGIT)
      while (end < n && (classes[end] == LETTER || classes[end] == DIGIT)) end++;
    if (class != SPACE) count += longest_pieces(v, word + at, end - at, ids + count);
  }
  return count;
}

/* The number of ids of a new word, written to the end of all ids; UNKNOWN if it is not for this file to encode. */
static int64_t encode_word(Cache *c, const uint8_t *p, int64_t n) {
  const Vocabulary *v = c->vocabulary;
  uint8_t word[LONGEST + LANES + 1], classes[LONGEST];
  if (v->kind == LIBRARY || n > LONGEST || c->used + n > c->max_ids || !read_word(v, p, n, word, classes)) return UNKNOWN;
  memset(word + n, 0, LANES + 1);
  return (v->kind == BYTE_BPE ? byte_merges : wordpieces)(v, word, classes, n, c->ids + c->used);
}

/* ------------------------------------------------------------------ what Python calls */

static int64_t piece_at(const Vocabulary *v, const uint8_t *p, const uint8_t *end) {
  const Key k = key_of(p, end - p);
  const Slot *found = slot_of(&v->pieces, &k);
  return found->length ? v->ids[~found->ids[0]] : UNKNOWN;
}

/* Whether all pieces and merges, of which two alike keep the last, are in the tables now; piece i has sizes[i] characters, and the
   two parts of a merge follow each other. Ids that are too large for the table of pairs are not for this file. */
static int learn(Vocabulary *v, int64_t count, const uint8_t *p, const int64_t *sizes, int64_t merges, const uint8_t *left,
                 const int64_t *merge_sizes) {
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *end = after_characters(p, sizes[i]);
    const Key k = key_of(p, end - p);
    if (!k.n || v->ids[i] >= NOBODY || !added(&v->pieces, &k)) return 0;
    if (k.n > v->longest) v->longest = k.n;
    p = end;
  }
  if (v->kind != BYTE_BPE) return 1;
  if (merges >> (RANK_BITS - 1)) return 0;
  for (int64_t rank = 0; rank < merges; rank++) {
    const uint8_t *right = after_characters(left, merge_sizes[2 * rank]), *end = after_characters(right, merge_sizes[2 * rank + 1]);
    const int64_t one = piece_at(v, left, right), other = piece_at(v, right, end), both = piece_at(v, left, end);
    if (one < 0 || other < 0 || both < 0) return 0;
    add_pair(v, (int32_t)one, (int32_t)other, (uint64_t)rank);
    v->merged[rank] = (int32_t)both;
    left = end;
  }
  const int32_t *letters = v->ids + v->pieces.count;
  for (int i = 0; i < 256 * 256; i++) v->first_keys[i] = key_of_pair(v, letters[i >> 8], letters[i & 255]);
  return 1;
}

/* Fills the tables of a vocabulary; one that `learn` refuses is left to the caller. */
int64_t malmoi_learn_vocabulary(Vocabulary *v, int64_t count, const uint8_t *pieces, const int64_t *sizes, int64_t merges,
                                const uint8_t *parts, const int64_t *merge_sizes) {
  if (!learn(v, count, pieces, sizes, merges, parts, merge_sizes)) v->kind = LIBRARY;
  return v->kind;
}

/* Writes the ids of a block of words, and counts those of the texts that end in it. Returns whether there was room for new words. */
static int write_ids(Cache *c, const Key *keys, int64_t n, int32_t **out, int64_t **counts, int32_t **start) {
  int32_t *at = *out;
  for (const Key *k = keys; k < keys + n; k++) {
    if (!k->p) {
      *(*counts)++ = at - *start;
      *start = at;
      continue;
    }
    Slot *slot = slot_of(&c->words, k);
    if (!slot->length) {
      if (!(slot = added(&c->words, k))) return 0;
      const int64_t size = encode_word(c, k->p, k->n);
      if (size != UNKNOWN) {
        set_ids(slot, c->ids, c->used, size);
        c->used += size;
      }
    }
    memcpy(at, slot->ids, sizeof slot->ids);
    c->left_out += slot->ids[0] < 0;
    if (slot->size > IDS_INLINE) /* beyond all ids there is room for a few */
      for (uint32_t i = 0; i < slot->size; i += 4) memcpy(at + i, c->ids + slot->place + i, 4 * sizeof *at);
    at += slot->size;
  }
  *out = at;
  return 1;
}

/* Writes the ids of `texts` one after another, and how many each has: text i has counts[i] characters at first. A word that is left
   to the caller is ~n. Returns the number of ids, or NO_ROOM. */
int64_t malmoi_encode_texts(Cache *c, const uint8_t *p, int64_t texts, int64_t *counts, int32_t *ids) {
  enum { BLOCK = 32 }; /* words whose slots come from memory together */
  Key keys[BLOCK];
  int64_t n = 0;
  int32_t *at = ids, *start = ids;
  int64_t *written = counts;
  c->left_out = 0;
  for (int64_t i = 0; i < texts; i++) {
    for (const uint8_t *end = after_characters(p, counts[i]), *next; p <= end; p = next) {
      if (p == end) keys[n].p = NULL, next = p + 1;
      else {
        next = word_end(p, end);
        keys[n] = key_of(p, next - p);
        __builtin_prefetch(c->words.slots + (keys[n].hash & (uint64_t)c->words.mask));
      }
      if (++n < BLOCK) continue;
      if (!write_ids(c, keys, n, &at, &written, &start)) return NO_ROOM;
      n = 0;
    }
    p--;
  }
  return write_ids(c, keys, n, &at, &written, &start) ? at - ids : NO_ROOM;
}

static Slot *slot_of_number(const Cache *c, int64_t number) {
  const Strings *s = &c->words;
  const Key k = key_of(s->bytes + s->starts[number], s->starts[number + 1] - s->starts[number]);
  return slot_of(s, &k);
}

/* Gives words their ids, which stand in `ids` one after another. Returns how many there were, or NO_ROOM. */
int64_t malmoi_learn_words(Cache *c, const int64_t *numbers, const int64_t *sizes, int64_t count, const int32_t *ids) {
  const int64_t first = c->used;
  for (int64_t i = 0; i < count; i++) {
    const int64_t bytes = c->words.starts[numbers[i] + 1] - c->words.starts[numbers[i]];
    if (c->used + sizes[i] > c->max_ids) return NO_ROOM;
    memcpy(c->ids + c->used, ids + (c->used - first), sizes[i] * sizeof *ids);
    set_ids(slot_of_number(c, numbers[i]), c->ids, c->used, sizes[i]);
    c->used += sizes[i];
    while (sizes[i] > c->widest * bytes) c->widest++;
  }
  return c->used - first;
}

/* Copies the ids of texts, with those of the words that had been left out. Returns how many there are. */
int64_t malmoi_fill_ids(const Cache *c, int64_t texts, int64_t *counts, const int32_t *ids, int32_t *out) {
  int32_t *at = out;
  for (int64_t i = 0; i < texts; i++) {
    const int32_t *start = at;
    for (const int32_t *last = ids + counts[i]; ids < last; ids++) {
      *at = *ids;
      if (*ids >= 0) at++;
      else {
        const Slot *slot = slot_of_number(c, ~*ids);
        memcpy(at, c->ids + slot->place, slot->size * sizeof *at);
        at += slot->size;
      }
    }
    counts[i] = at - start;
  }
  return at - out;
}
