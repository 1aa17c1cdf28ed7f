/* All layers of a Transformer with quantised weights in one call: the calls between products cost more than the products themselves
   when each is a call of its own. Follows int8_row.c in one translation unit. `malmoi_decode_step` is one new token of every row of a
   causal model; encode_texts.c has whole texts. */

enum { SPAN = 64 }; /* keys whose scores are held at once */

typedef struct {
  const float *weight, *bias; /* weight NULL: no norm at all; bias NULL: none */
} Norm;

typedef struct {
  Linear qkv, out, up, down;
  Norm attention_norm, mlp_norm; /* of the input of each half */
  float *keys, *values;          /* [rows, key_heads, places, size]; NULL in an encoder */
  const float *cos, *sin;        /* [context, size / 2], or NULL */
  long window;                   /* of an encoder: tokens less than so far apart see each other; 0: all do */
} Layer;

typedef struct {
  const Layer *layers;
  Norm last;
  long depth, width, heads, key_heads, size, places;
  int32_t activation, gated, rms, qk_norm;
  int32_t post; /* norms replace the residual stream instead of branching from it */
  float eps;
} Trunk;

typedef struct Step Step;
struct Step {
  const Trunk *trunk;
  void (*mix)(const Step *, const Layer *); /* attention: from `wide` into `mixed`, by every thread of the team */
  float *x;                                 /* [rows, width] */
  const int64_t *at;                        /* [rows] positions; of a decoding step also their places in the cache */
  const uint8_t *live;                      /* [rows] others are computed but neither stored nor read; NULL in an encoder */
  const int64_t *starts;                    /* [texts + 1] first rows; NULL in a decoding step */
  long rows, texts;
  int parts; /* bytes of an activation */
  float *normed, *wide, *mixed, *turned;
  int8_t *room;
};

static void normalise(const float *x, float *y, const Norm *norm, long n, int rms, float eps) {
  float mean = 0.0f, square = 0.0f;
  if (!rms) {
    for (long i = 0; i < n; i++) mean += x[i];
    mean /= n;
  }
  for (long i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / sqrtf(square / n + eps);
  if (!norm->weight)
    for (long i = 0; i < n; i++) y[i] = (x[i] - mean) * scale;
  else
    for (long i = 0; i < n; i++) y[i] = (x[i] - mean) * scale * norm->weight[i] + (norm->bias ? norm->bias[i] : 0.0f);
}

/* Rows for a product: those of weights of 32 bits stay as they are, others are to be split. */
static Split parts_of(const Step *s, const Linear *map, const float *rows, long apart) {
  if (map->bits == 32) return (Split){.plain = rows, .apart = apart};
  return split_in(s->room, map, s->rows, s->parts);
}

/* Normalises and splits every row for the product that follows. */
static Split enter(const Step *s, const Norm *norm, const Linear *map) {
  const Trunk *t = s->trunk;
  float *to = t->post || !norm->weight ? s->x : s->normed;
  const Split parts = parts_of(s, map, to, t->width);
#pragma omp for schedule(static)
  for (long r = 0; r < s->rows; r++) {
    float *x = s->x + r * t->width, *y = to + r * t->width;
    if (norm->weight) normalise(x, y, norm, t->width, t->rms, t->eps);
    if (!parts.plain) split(map, y, r, &parts);
  }
  return parts;
}

static void rotate(const Trunk *t, const Layer *layer, float *head, long position) {
  const Norm plain = {NULL, NULL};
  if (t->qk_norm) normalise(head, head, &plain, t->size, t->rms, t->eps);
  if (!layer->cos) return;
  const long half = t->size / 2;
  const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
  for (long i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

/* softmax(q k^T / sqrt(size)) v over `count` places, SPAN at a time. */
static void attend(const float *q, const float *keys, const float *values, float *y, long count, long size) {
  const float scale = 1.0f / sqrtf((float)size);
  float most = -3e38f, total = 0.0f, score[SPAN];
  for (long e = 0; e < size; e++) y[e] = 0.0f;
  for (long first = 0; first < count; first += SPAN) {
    const long span = count - first < SPAN ? count - first : SPAN;
    float highest = most;
    for (long j = 0; j < span; j++) {
      const float *k = keys + (first + j) * size;
      float dot = 0.0f;
      for (long e = 0; e < size; e++) dot += q[e] * k[e];
      score[j] = dot * scale;
      highest = fmaxf(highest, score[j]);
    }
    if (first && highest > most) {
      const float shrink = exp_of(most - highest);
      total *= shrink;
      for (long e = 0; e < size; e++) y[e] *= shrink;
    }
    most = highest;
    for (long j = 0; j < span; j++) total += score[j] = exp_of(score[j] - most);
    for (long j = 0; j < span; j++) {
      const float *v = values + (first + j) * size;
      for (long e = 0; e < size; e++) y[e] += score[j] * v[e];
    }
  }
  for (long e = 0; e < size; e++) y[e] /= total;
}

/* Stores the new key and value, and reads for each query head that shares them. */
static void attend_group(const Step *s, const Layer *layer, long row, long group) {
  const Trunk *t = s->trunk;
  const long size = t->size, each = t->heads / t->key_heads, at = s->at[row], start = (row * t->key_heads + group) * t->places * size;
  float *heads = s->wide + row * layer->qkv.outputs, *y = s->mixed + (row * t->heads + group * each) * size;
  float *k = heads + (t->heads + group) * size, *v = k + t->key_heads * size;
  if (!s->live[row]) {
    memset(y, 0, each * size * sizeof(float));
    return;
  }
  rotate(t, layer, k, at);
  memcpy(layer->keys + start + at * size, k, size * sizeof(float));
  memcpy(layer->values + start + at * size, v, size * sizeof(float));
  for (long h = 0; h < each; h++) {
    float *q = heads + (group * each + h) * size;
    rotate(t, layer, q, at);
    attend(q, layer->keys + start, layer->values + start, y + h * size, at + 1, size);
  }
}

static void attend_cache(const Step *s, const Layer *layer) {
#pragma omp for collapse(2) schedule(static)
  for (long r = 0; r < s->rows; r++)
    for (long g = 0; g < s->trunk->key_heads; g++) attend_group(s, layer, r, g);
}

/* Splits rows as they are. */
static Split leave(const Step *s, const float *rows, long stride, const Linear *map) {
  const Split parts = parts_of(s, map, rows, stride);
  if (parts.plain) return parts;
#pragma omp for schedule(static)
  for (long r = 0; r < s->rows; r++) split(map, rows + r * stride, r, &parts);
  return parts;
}

/* f(gate) * up, in the place of the gate. */
static void gate(const Step *s, long n) {
#pragma omp for schedule(static)
  for (long r = 0; r < s->rows; r++) {
    float *row = s->wide + r * 2 * n;
    activate(row, n, s->trunk->activation);
    for (long i = 0; i < n; i++) row[i] *= row[n + i];
  }
}

static void run_layer(const Step *s, const Layer *layer) {
  const Trunk *t = s->trunk;
  const Target heads = {s->wide, s->rows, NONE, 0}, stream = {s->x, s->rows, NONE, 1};
  const Target hidden = {s->wide, s->rows, t->gated ? NONE : t->activation, 0};
  Split parts = enter(s, &layer->attention_norm, &layer->qkv);
  multiply(&layer->qkv, &parts, &heads);
  s->mix(s, layer);
  parts = leave(s, s->mixed, layer->out.inputs, &layer->out);
  multiply(&layer->out, &parts, &stream);
  parts = enter(s, &layer->mlp_norm, &layer->up);
  multiply(&layer->up, &parts, &hidden);
  if (t->gated) gate(s, layer->down.inputs);
  parts = leave(s, s->wide, layer->up.outputs, &layer->down);
  multiply(&layer->down, &parts, &stream);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Every layer and the last norm; `turned` is the number of floats that `mix` needs there. 0: done; 1: no memory. */
static int run_layers(Step *s, size_t turned) {
  const Trunk *t = s->trunk;
  size_t bytes = 0, wide = 0;
  long weights = 0;
  for (long i = 0; i < t->depth; i++) {
    const Layer *l = t->layers + i;
    const Linear *maps[] = {&l->qkv, &l->out, &l->up, &l->down};
    for (int m = 0; m < 4; m++) {
      bytes = larger(bytes, split_bytes(maps[m], s->rows, s->parts));
      weights += maps[m]->outputs * maps[m]->inputs;
    }
    wide = larger(wide, larger(l->qkv.outputs, l->up.outputs));
  }
  const size_t floats = s->rows * (t->width + wide + t->heads * t->size) + turned;
  int8_t *room = scratch(floats * sizeof(float) + bytes);
  if (!room) return 1;
  s->normed = (float *)room;
  s->wide = s->normed + s->rows * t->width;
  s->mixed = s->wide + s->rows * wide;
  s->turned = s->mixed + s->rows * t->heads * t->size;
  s->room = room + floats * sizeof(float);
#pragma omp parallel if (s->rows * weights > 32 * SERIAL)
  {
    for (long i = 0; i < t->depth; i++) run_layer(s, t->layers + i);
#pragma omp for schedule(static)
    for (long r = 0; r < s->rows; r++) {
      float *x = s->x + r * t->width;
      if (t->last.weight) normalise(x, x, &t->last, t->width, t->rms, t->eps);
    }
  }
  return 0;
}

/* x [rows, width] becomes the trunk's output. 0: done; 1: no memory. */
int malmoi_decode_step(const Trunk *t, float *x, const int64_t *at, const uint8_t *live, long rows) {
  Step step = {.trunk = t, .mix = attend_cache, .x = x, .at = at, .live = live, .rows = rows, .parts = PARTS};
  return run_layers(&step, 0);
}
