/* The suffix array of a text of numbers by induced sorting, in linear time.

   Nong, Zhang & Chan 2009, "Two efficient algorithms for linear time suffix array construction": the suffixes are of
   type S (smaller than the next one) or L (larger). Sorting the leftmost S of each run (LMS) sorts all the others, and
   those are sorted by numbering their pieces and sorting the text of these numbers, which is at most half as long. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 16 /* places that are fetched before they are needed: the text is read in random order */

typedef struct {
  const int32_t *text;
  int32_t *found;
  int64_t size;
  int64_t letters;
  uint8_t *small; /* a bit a place: whether its suffix is of type S */
  int32_t *counts;
  int32_t *next; /* the next free place in the part of each letter */
} Sorting;

static int is_small(const Sorting *s, int64_t at) { return s->small[at >> 3] >> (at & 7) & 1; }

static int is_leftmost(const Sorting *s, int64_t at) { return at > 0 && is_small(s, at) && !is_small(s, at - 1); }

static void find_types(Sorting *s) {
  s->small[(s->size - 1) >> 3] |= 1 << ((s->size - 1) & 7);
  for (int64_t at = s->size - 2; at >= 0; at--) {
    int32_t here = s->text[at], after = s->text[at + 1];
    if (here < after || (here == after && is_small(s, at + 1))) s->small[at >> 3] |= 1 << (at & 7);
  }
}

static void to_starts(Sorting *s) {
  int32_t sum = 0;
  for (int64_t letter = 0; letter < s->letters; letter++) s->next[letter] = sum, sum += s->counts[letter];
}

static void to_ends(Sorting *s) {
  int32_t sum = 0;
  for (int64_t letter = 0; letter < s->letters; letter++) s->next[letter] = sum += s->counts[letter];
}

static void fetch(const Sorting *s, int64_t i) {
  if (i >= 0 && i < s->size && s->found[i] > 0) __builtin_prefetch(&s->text[s->found[i] - 1]);
}

/* From the sorted leftmost ones, all of type L from the left, then all of type S from the right. */
static void induce(Sorting *s) {
  to_starts(s);
  for (int64_t i = 0; i < s->size; i++) {
    fetch(s, i + AHEAD);
    int32_t at = s->found[i] - 1;
    if (at >= 0 && !is_small(s, at)) s->found[s->next[s->text[at]]++] = at;
  }
  to_ends(s);
  for (int64_t i = s->size - 1; i >= 0; i--) {
    fetch(s, i - AHEAD);
    int32_t at = s->found[i] - 1;
    if (at >= 0 && is_small(s, at)) s->found[--s->next[s->text[at]]] = at;
  }
}

static int same_piece(const Sorting *s, int64_t one, int64_t other) {
  for (int64_t i = 0;; i++) {
    if (s->text[one + i] != s->text[other + i] || is_small(s, one + i) != is_small(s, other + i)) return 0;
    if (i > 0 && (is_leftmost(s, one + i) || is_leftmost(s, other + i))) return 1;
  }
}

/* Puts the number of each leftmost one's piece at the end of `found`, in the order of the text. */
static int64_t number_pieces(Sorting *s, int64_t count) {
  int64_t names = 0, before = -1;
  memset(s->found + count, -1, (s->size - count) * sizeof(int32_t));
  for (int64_t i = 0; i < count; i++) {
    int64_t at = s->found[i];
    if (before < 0 || !same_piece(s, at, before)) names++, before = at;
    s->found[count + at / 2] = (int32_t)(names - 1);
  }
  for (int64_t i = s->size - 1, to = s->size - 1; i >= count; i--)
    if (s->found[i] >= 0) s->found[to--] = s->found[i];
  return names;
}

static int64_t sort_suffixes(const int32_t *text, int32_t *found, int64_t size, int64_t letters);

static int64_t sort_leftmost(Sorting *s) {
  memset(s->found, -1, s->size * sizeof(int32_t));
  to_ends(s);
  for (int64_t at = 1; at < s->size; at++)
    if (is_leftmost(s, at)) s->found[--s->next[s->text[at]]] = (int32_t)at;
  induce(s);
  int64_t count = 0;
  for (int64_t i = 0; i < s->size; i++)
    if (is_leftmost(s, s->found[i])) s->found[count++] = s->found[i];
  int64_t names = number_pieces(s, count);
  int32_t *numbers = s->found + s->size - count;
  if (names < count) {
    if (sort_suffixes(numbers, s->found, count, names)) return -1;
  } else {
    for (int64_t i = 0; i < count; i++) s->found[numbers[i]] = (int32_t)i;
  }
  int64_t next = 0;
  for (int64_t at = 1; at < s->size; at++)
    if (is_leftmost(s, at)) numbers[next++] = (int32_t)at;
  for (int64_t i = 0; i < count; i++) s->found[i] = numbers[s->found[i]];
  return count;
}

static int64_t sort_suffixes(const int32_t *text, int32_t *found, int64_t size, int64_t letters) {
  if (size == 1) {
    found[0] = 0;
    return 0;
  }
  Sorting s = {text, found, size, letters, calloc(size / 8 + 1, 1), calloc(letters, 4), malloc(letters * 4)};
  int64_t count = -1;
  if (s.small && s.counts && s.next) {
    for (int64_t i = 0; i < size; i++) s.counts[text[i]]++;
    find_types(&s);
    count = sort_leftmost(&s);
  }
  if (count >= 0) {
    memset(found + count, -1, (size - count) * sizeof(int32_t));
    to_ends(&s);
    for (int64_t i = count - 1; i >= 0; i--) {
      int32_t at = found[i];
      found[i] = -1;
      found[--s.next[text[at]]] = at;
    }
    induce(&s);
  }
  free(s.small), free(s.counts), free(s.next);
  return count < 0;
}

/* `text`: `size` numbers below `letters`, of which only the last is 0. Returns 1 where memory lacks. */
int64_t malmoi_suffix_array(const int32_t *text, int32_t *found, int64_t size, int64_t letters) {
  return sort_suffixes(text, found, size, letters);
}
