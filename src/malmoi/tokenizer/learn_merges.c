/* Learns the merges of a BPE or WordPiece from words and how often each occurs.

   The same merges in the same order as the trainer of `tokenizers`, ties too: of the pairs that are
   most frequent the one with the smaller ids is merged. A pair may wait in the heap more than once,
   each time with words of its own, where the new token was there already. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int64_t key, count; int32_t waiting, last; } Pair; /* waiting: its first node */
typedef struct { int32_t word, next; } Node;
typedef struct { int64_t count, key; int32_t pair, nodes; } Entry;

typedef struct {
    int32_t *slots; int64_t mask;
    Pair *pairs; int32_t count, room;
    Node *nodes; int32_t node_count, node_room;
    Entry *heap; int64_t heap_count, heap_room;
    int32_t *touched; int64_t touched_count, touched_room;
    int failed;
} State;

static void *grown(State *s, void *old, int64_t count, int64_t size) {
    void *found = s->failed ? NULL : realloc(old, (size_t)(count * size));
    if (!found) { s->failed = 1; return old; }
    return found;
}

static uint64_t mixed(uint64_t x) {
    x ^= x >> 31; x *= 0x9E3779B97F4A7C15u; x ^= x >> 29;
    return x;
}

static void widen(State *s) {
    int64_t size = 2 * (s->mask + 1);
    int32_t *slots = malloc((size_t)size * sizeof *slots);
    if (!slots) { s->failed = 1; return; }
    memset(slots, 0xff, (size_t)size * sizeof *slots);
    for (int32_t i = 0; i < s->count; i++) {
        uint64_t at = mixed((uint64_t)s->pairs[i].key) & (uint64_t)(size - 1);
        while (slots[at] >= 0) at = (at + 1) & (uint64_t)(size - 1);
        slots[at] = i;
    }
    free(s->slots);
    s->slots = slots; s->mask = size - 1;
}

static int32_t pair_of(State *s, int32_t left, int32_t right) {
    int64_t key = (int64_t)left << 32 | right;
    uint64_t at = mixed((uint64_t)key) & (uint64_t)s->mask;
    while (s->slots[at] >= 0) {
        if (s->pairs[s->slots[at]].key == key) return s->slots[at];
        at = (at + 1) & (uint64_t)s->mask;
    }
    if (s->count == s->room) {
        s->pairs = grown(s, s->pairs, 2 * (int64_t)s->room, sizeof *s->pairs);
        if (s->failed) return 0;
        s->room *= 2;
    }
    s->pairs[s->count] = (Pair){key, 0, -1, -1};
    s->slots[at] = s->count++;
    if (2 * (int64_t)s->count > s->mask) widen(s);
    return s->count - 1;
}

/* Counts a pair in a word; where it is new there, the word waits for its merge. */
static void change(State *s, int32_t left, int32_t right, int64_t by, int32_t word, int is_new) {
    int32_t at = pair_of(s, left, right);
    if (s->failed) return;
    Pair *pair = s->pairs + at;
    pair->count += by;
    if (!is_new || pair->last == word) return;
    if (pair->waiting < 0) {
        if (s->touched_count == s->touched_room) {
            s->touched = grown(s, s->touched, 2 * s->touched_room, sizeof *s->touched);
            if (s->failed) return;
            s->touched_room *= 2;
        }
        s->touched[s->touched_count++] = at;
    }
    if (s->node_count == s->node_room) {
        if (s->node_room > 1 << 29) s->failed = 1;
        s->nodes = grown(s, s->nodes, 2 * (int64_t)s->node_room, sizeof *s->nodes);
        if (s->failed) return;
        s->node_room *= 2;
    }
    s->nodes[s->node_count] = (Node){word, pair->waiting};
    pair->waiting = s->node_count++;
    pair->last = word;
}

static int before(const Entry *a, const Entry *b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}

static void push(State *s, Entry entry) {
    if (s->heap_count == s->heap_room) {
        s->heap = grown(s, s->heap, 2 * s->heap_room, sizeof *s->heap);
        if (s->failed) return;
        s->heap_room *= 2;
    }
    int64_t at = s->heap_count++;
    for (; at && before(&entry, s->heap + (at - 1) / 2); at = (at - 1) / 2)
        s->heap[at] = s->heap[(at - 1) / 2];
    s->heap[at] = entry;
}

static Entry pop(State *s) {
    Entry top = s->heap[0], last = s->heap[--s->heap_count];
    int64_t at = 0, child;
    while ((child = 2 * at + 1) < s->heap_count) {
        if (child + 1 < s->heap_count && before(s->heap + child + 1, s->heap + child)) child++;
        if (!before(s->heap + child, &last)) break;
        s->heap[at] = s->heap[child];
        at = child;
    }
    s->heap[at] = last;
    return top;
}

static void push_touched(State *s) {
    for (int64_t i = 0; i < s->touched_count; i++) {
        Pair *pair = s->pairs + s->touched[i];
        if (pair->count > 0)
            push(s, (Entry){pair->count, pair->key, s->touched[i], pair->waiting});
        pair->waiting = pair->last = -1;
    }
    s->touched_count = 0;
}

/* Merges a pair in one word; the number of its tokens afterwards. */
static int32_t merge_word(State *s, int32_t *ids, int32_t size, int32_t word, int64_t times,
                          int32_t left, int32_t right, int32_t new) {
    int32_t to = 0;
    for (int32_t from = 0; from < size;) {
        if (ids[from] != left || from + 1 == size || ids[from + 1] != right) {
            ids[to++] = ids[from++];
            continue;
        }
        if (to) {
            change(s, ids[to - 1], left, -times, word, 0);
            change(s, ids[to - 1], new, times, word, 1);
        }
        ids[to++] = new;
        from += 2;
        if (from < size) {
            change(s, right, ids[from], -times, word, 0);
            change(s, new, ids[from], times, word, 1);
        }
    }
    return to;
}

typedef struct { uint8_t *bytes; int64_t *starts; int32_t *slots; int64_t mask, count, room; } Names;

/* The token of these bytes; a new one where there is none. */
static int32_t token_of(Names *n, const uint8_t *bytes, int64_t size, int *failed) {
    uint64_t at = 1469598103934665603u;
    for (int64_t i = 0; i < size; i++) at = (at ^ bytes[i]) * 1099511628211u;
    at = mixed(at) & (uint64_t)n->mask;
    for (; n->slots[at] >= 0; at = (at + 1) & (uint64_t)n->mask) {
        int64_t start = n->starts[n->slots[at]];
        if (n->starts[n->slots[at] + 1] - start == size && !memcmp(n->bytes + start, bytes, size))
            return n->slots[at];
    }
    int64_t start = n->starts[n->count];
    while (start + size > n->room) {
        uint8_t *more = realloc(n->bytes, (size_t)(2 * n->room));
        if (!more) { *failed = 1; return 0; }
        n->bytes = more; n->room *= 2;
    }
    memcpy(n->bytes + start, bytes, (size_t)size);
    n->starts[n->count + 1] = start + size;
    return n->slots[at] = (int32_t)n->count++;
}

/* `names` holds the tokens there are, `known` of them. Word w is the `ids` from starts[w] to starts[w + 1], which change; it occurs
   counts[w] times. A token that begins with `prefix` bytes of "##" is joined without them. Writes the pairs of ids that were merged,
   at most `room`; returns how many, or -1. */
int64_t malmoi_learn_merges(const uint8_t *names, const int64_t *name_ends, int64_t known, int32_t *ids, const int64_t *starts,
                            int64_t words, const int64_t *counts, int64_t vocab, int64_t least, int64_t prefix, int32_t *merges,
                            int64_t room) {
    State s = {0};
    Names n = {0};
    int64_t found = 0, joined_room = 0;
    uint8_t *joined = NULL;
    s.mask = 0xffff; s.room = 1 << 15; s.node_room = 1 << 16; s.heap_room = s.touched_room = 1 << 12;
    s.slots = malloc((s.mask + 1) * sizeof *s.slots);
    s.pairs = malloc(s.room * sizeof *s.pairs);
    s.nodes = malloc(s.node_room * sizeof *s.nodes);
    s.heap = malloc(s.heap_room * sizeof *s.heap);
    s.touched = malloc(s.touched_room * sizeof *s.touched);
    n.mask = 1023;
    while (n.mask < 2 * (vocab + known)) n.mask = 2 * n.mask + 1;
    n.room = 1 << 16;
    n.bytes = malloc(n.room);
    n.starts = calloc(vocab + known + 2, sizeof *n.starts);
    n.slots = malloc((n.mask + 1) * sizeof *n.slots);
    int32_t *sizes = malloc((words + 1) * sizeof *sizes);
    s.failed = !s.slots || !s.pairs || !s.nodes || !s.heap || !s.touched || !n.bytes || !n.starts || !n.slots || !sizes;
    if (s.failed) goto end;
    memset(s.slots, 0xff, (s.mask + 1) * sizeof *s.slots);
    memset(n.slots, 0xff, (n.mask + 1) * sizeof *n.slots);
    for (int64_t i = 0, start = 0; i < known; start = name_ends[i++]) token_of(&n, names + start, name_ends[i] - start, &s.failed);
    for (int32_t w = 0; w < words && !s.failed; w++) {
        int32_t *word = ids + starts[w];
        sizes[w] = (int32_t)(starts[w + 1] - starts[w]);
        for (int32_t i = 0; i + 1 < sizes[w]; i++) change(&s, word[i], word[i + 1], counts[w], w, 1);
    }
    push_touched(&s);
    while (n.count < vocab && s.heap_count && !s.failed) {
        Entry top = pop(&s);
        const int64_t now = s.pairs[top.pair].count;
        if (top.count != now) {
            top.count = now;
            push(&s, top);
            continue;
        }
        if (top.count < 1 || top.count < least) break;
        const int32_t left = (int32_t)(top.key >> 32), right = (int32_t)top.key;
        const int64_t a = n.starts[left + 1] - n.starts[left];
        int64_t second = n.starts[right], b = n.starts[right + 1] - second;
        if (prefix && b >= prefix && !memcmp(n.bytes + second, "##", prefix)) { second += prefix; b -= prefix; }
        if (a + b > joined_room) joined = grown(&s, joined, joined_room = 2 * (a + b), 1);
        if (s.failed || found == room) { s.failed = 1; break; }
        memcpy(joined, n.bytes + n.starts[left], a);
        memcpy(joined + a, n.bytes + second, b);
        const int32_t new = token_of(&n, joined, a + b, &s.failed);
        merges[2 * found] = left;
        merges[2 * found++ + 1] = right;
        for (int32_t at = top.nodes; at >= 0 && !s.failed; at = s.nodes[at].next) {
            const int32_t w = s.nodes[at].word;
            sizes[w] = merge_word(&s, ids + starts[w], sizes[w], w, counts[w], left, right, new);
        }
        push_touched(&s);
    }
end:
    free(s.slots); free(s.pairs); free(s.nodes); free(s.heap); free(s.touched);
    free(n.bytes); free(n.starts); free(n.slots); free(sizes); free(joined);
    return s.failed ? -1 : found;
}
