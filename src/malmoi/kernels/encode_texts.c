
/* Whole texts through all layers of a bidirectional Transformer with quantised weights. Follows decode_step.c in one translation unit.

   The rows of the texts lie one after another, without padding. Activations are rounded to 8 bits, SHARED of them with one step:
   a product is then bound by dot products and takes half as many as with 15 bits. On PAIRS they keep 15. */

enum { WIDEST_HEAD = 256, ENOUGH = 256 }; /* ENOUGH rows at once: weights are then read seldom, and the rows fit into a cache */

/* out [QUERIES][LANES] += a [QUERIES][depth] b [depth][LANES]: the inner loop of both products of attention. */
static inline void add_product(const float *const *a, const float *b, long b_stride, long depth, float *out, long out_stride) {
  Vector sum[QUERIES][LANES / VECTOR];
  for (int r = 0; r < QUERIES; r++)
    for (int c = 0; c < LANES / VECTOR; c++) sum[r][c] = *(Vector *)(out + r * out_stride + c * VECTOR);
  for (long k = 0; k < depth; k++)
    for (int r = 0; r < QUERIES; r++)
      for (int c = 0; c < LANES / VECTOR; c++) sum[r][c] += a[r][k] * *(const Vector *)(b + k * b_stride + c * VECTOR);
  for (int r = 0; r < QUERIES; r++)
    for (int c = 0; c < LANES / VECTOR; c++) *(Vector *)(out + r * out_stride + c * VECTOR) = sum[r][c];
}

typedef struct { /* one head of one text */
  const float *turned; /* its keys / sqrt(size) [size][stride] */
  const float *values; /* [tokens][size], copied because rows of `wide` lie so far apart that they compete for places in the cache */
  const int64_t *at;   /* positions of the tokens, increasing */
  long stride, tokens, size, window;
} Head;

/* softmax(q k^T / sqrt(size)) v of the queries of tokens `i` and later, SPAN keys at a time. */
static void attend_tile(const Head *head, const float *const *q, long i, float y[QUERIES][WIDEST_HEAD]) {
  const long reach = head->window ? head->window : head->tokens, size = head->size;
  const long from = i < reach ? 0 : (i - reach) / LANES * LANES, end = at_most(head->tokens, i + QUERIES + reach);
  float most[QUERIES], total[QUERIES] = {0}, score[QUERIES][SPAN];
  const float *p[QUERIES];
  for (int r = 0; r < QUERIES; r++) {
    most[r] = -3e38f, p[r] = score[r];
    memset(y[r], 0, size * sizeof(float));
  }
  for (long first = from; first < end; first += SPAN) {
    const long span = at_most(end - first, SPAN), filled = ceiling(span, LANES) * LANES;
    memset(score, 0, sizeof score);
    for (long j = 0; j < filled; j += LANES) add_product(q, head->turned + first + j, head->stride, size, score[0] + j, SPAN);
    for (int r = 0; r < QUERIES; r++) {
      if (head->window)
        for (long j = 0; j < span; j++)
          if (labs(head->at[first + j] - head->at[at_most(i + r, head->tokens - 1)]) >= reach) score[r][j] = -3e38f;
      float highest = most[r], sum = 0.0f;
      for (long j = 0; j < span; j++) highest = fmaxf(highest, score[r][j]);
      const float shrink = exp_of(most[r] - highest);
      for (long j = 0; j < span; j++) sum += score[r][j] = exp_of(score[r][j] - highest);
      for (long e = 0; e < size; e++) y[r][e] *= shrink;
      total[r] = total[r] * shrink + sum;
      most[r] = highest;
    }
    for (long e = 0; e < size; e += LANES) add_product(p, head->values + first * size + e, size, span, y[0] + e, WIDEST_HEAD);
  }
  for (int r = 0; r < QUERIES; r++)
    for (long e = 0; e < size; e++) y[r][e] /= total[r];
}

/* Keys as columns, filled up with zeros, and values as rows; both are `row` floats apart in `wide`. */
static void gather(const float *keys, const float *values, long row, const Head *head, float *turned) {
  const float scale = 1.0f / sqrtf((float)head->size);
  for (long e = 0; e < head->size; e++) {
    for (long j = 0; j < head->tokens; j++) turned[e * head->stride + j] = keys[j * row + e] * scale;
    for (long j = head->tokens; j < head->stride; j++) turned[e * head->stride + j] = 0.0f;
  }
  float *to = turned + head->size * head->stride;
  for (long j = 0; j < head->tokens; j++) memcpy(to + j * head->size, values + j * row, head->size * sizeof(float));
}

/* One key head of one text, and each query head that shares it. */
static void attend_text(const Step *s, const Layer *layer, long text, long group) {
  const Trunk *t = s->trunk;
  const long start = s->starts[text] - s->starts[0], tokens = s->starts[text + 1] - s->starts[text];
  const long row = layer->qkv.outputs, size = t->size, each = t->heads / t->key_heads, stride = ceiling(tokens, LANES) * LANES;
  float *queries = s->wide + start * row + group * each * size, *keys = s->wide + start * row + (t->heads + group) * size;
  float *turned = s->turned + 2 * ((start + text * LANES) * t->key_heads + group * stride) * size, y[QUERIES][WIDEST_HEAD];
  const Head head = {turned, turned + size * stride, s->at + start, stride, tokens, size, layer->window};
  for (long j = 0; j < tokens; j++) {
    rotate(t, layer, keys + j * row, s->at[start + j]);
    for (long h = 0; h < each; h++) rotate(t, layer, queries + j * row + h * size, s->at[start + j]);
  }
  gather(keys, keys + t->key_heads * size, row, &head, turned);
  for (long h = 0; h < each; h++)
    for (long i = 0; i < tokens; i += QUERIES) {
      const float *q[QUERIES];
      for (int r = 0; r < QUERIES; r++) q[r] = queries + at_most(i + r, tokens - 1) * row + h * size;
      attend_tile(&head, q, i, y);
      float *to = s->mixed + ((start + i) * t->heads + group * each + h) * size;
      for (long r = 0; r < at_most(QUERIES, tokens - i); r++) memcpy(to + r * t->heads * size, y[r], size * sizeof(float));
    }
}

static void attend_texts(const Step *s, const Layer *layer) {
#pragma omp for collapse(2) schedule(dynamic)
  for (long text = 0; text < s->texts; text++)
    for (long g = 0; g < s->trunk->key_heads; g++) attend_text(s, layer, text, g);
}

/* x [tokens of all texts, width] becomes the trunk's output; `starts` [texts + 1] are their first rows. 0: done; 1: no memory. */
int malmoi_encode_texts(const Trunk *t, float *x, const int64_t *at, const int64_t *starts, long texts) {
  for (long first = 0, last; first < texts; first = last) {
    for (last = first + 1; last < texts && starts[last + 1] - starts[first] <= ENOUGH; last++) continue;
    const long from = starts[first], rows = starts[last] - from;
    Step step = {.trunk = t, .mix = attend_texts, .x = x + from * t->width, .at = at + from, .starts = starts + first};
    step.rows = rows, step.texts = last - first, step.parts = 1;
    if (run_layers(&step, 2 * (rows + step.texts * LANES) * t->key_heads * t->size)) return 1;
  }
  return 0;
}
