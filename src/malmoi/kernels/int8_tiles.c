/* Many rows times 8-bit weights on AMX: one instruction multiplies 16 rows by 16 outputs over 64 inputs. Follows int8_row.c in one
   translation unit, which has the other products. x is split into two signed bytes here, too, because a second product costs little. */

enum { SIDE = 16, DEPTH = 64, TILE_BYTES = SIDE * DEPTH, MANY = 32, WHOLE_CHUNK = 256 };

#if defined(__AMX_INT8__) && !defined(NO_TILES)
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives a process its tiles when it first asks: ARCH_REQ_XCOMP_PERM for XTILEDATA. */
static int has_tiles(void) {
  static int asked = 0, given = 0;
  if (!asked) given = syscall(SYS_arch_prctl, 0x1023, 18) == 0, asked = 1;
  return given;
}

/* A row into its lines of the tiles [tile][input / DEPTH][high, low][SIDE][DEPTH]. */
static void split_tiles(const Linear *map, const float *x, long row, const Split *to) {
  int8_t *tile = (int8_t *)to->cells + row / SIDE * 2 * SIDE * map->inputs + row % SIDE * DEPTH;
  float most = 1e-30f;
  for (long i = 0; i < map->inputs; i++) most = fmaxf(most, fabsf(x[i]));
  const float inverse = 127.0f / most;
  for (long i = 0; i < map->inputs; i += DEPTH, tile += 2 * TILE_BYTES)
    for (int k = 0; k < DEPTH; k++) {
      const float value = x[i + k] * inverse;
      const int32_t high = whole(value);
      tile[k] = (int8_t)high;
      tile[k + TILE_BYTES] = (int8_t)whole((value - (float)high) * 127.0f);
    }
  to->step[row] = most / 127.0f;
}

/* Two blocks of 16 outputs for 16 rows: their sums of high and of low bytes. */
static void tile_sums(const int8_t *x, const uint8_t *first, const uint8_t *second, long inputs, int32_t sum[4][SIDE][SIDE]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long i = 0; i < inputs; i += DEPTH, x += 2 * TILE_BYTES) {
    _tile_loadd(4, x, DEPTH);
    _tile_loadd(5, x + TILE_BYTES, DEPTH);
    _tile_loadd(6, first + i * LANES, DEPTH);
    _tile_loadd(7, second + i * LANES, DEPTH);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, sum[0], DEPTH);
  _tile_stored(1, sum[1], DEPTH);
  _tile_stored(2, sum[2], DEPTH);
  _tile_stored(3, sum[3], DEPTH);
}

/* The outputs of a block for 16 rows or fewer. */
static void finish_tile(const Linear *map, const Split *x, const Target *to, long b, long row, int32_t sum[2][SIDE][SIDE]) {
  const __m512 scale = scales_at(map->scale + b * LANES), small = _mm512_set1_ps(1.0f / 127.0f);
  float found[LANES];
  for (long r = 0; r < at_most(to->rows - row, SIDE); r++) {
    const __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum[0][r])), low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum[1][r]));
    const __m512 dot = _mm512_mul_ps(_mm512_fmadd_ps(low, small, high), scale);
    _mm512_storeu_ps(found, _mm512_mul_ps(dot, _mm512_set1_ps(x->step[row + r])));
    finish(map, to, row + r, b * LANES, at_most(map->outputs - b * LANES, LANES), found);
  }
}

/* Rows in tiles times every block; the threads of the team share the blocks. */
static void multiply_tiles(const Linear *map, const Split *x, const Target *to) {
  const long blocks = ceiling(map->outputs, LANES), apart = LANES * map->inputs;
  const struct {
    uint8_t palette, start, none[14];
    uint16_t width[16];
    uint8_t rows[16];
  } tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  int32_t sum[4][SIDE][SIDE] __attribute__((aligned(64)));
  _tile_loadconfig(&tiles);
#pragma omp for schedule(static)
  for (long b = 0; b < blocks; b += 2) {
    const long other = at_most(b + 1, blocks - 1);
    for (long row = 0; row < to->rows; row += SIDE) {
      tile_sums((const int8_t *)x->cells + row * 2 * map->inputs, map->weights + b * apart, map->weights + other * apart, map->inputs, sum);
      finish_tile(map, x, to, b, row, sum);
      if (other > b) finish_tile(map, x, to, other, row, sum + 2);
    }
  }
  _tile_release();
}
#else
static int has_tiles(void) { return 0; }
static void split_tiles(const Linear *map, const float *x, long row, const Split *to) { (void)map, (void)x, (void)row, (void)to; }
static void multiply_tiles(const Linear *map, const Split *x, const Target *to) { (void)map, (void)x, (void)to; }
#endif

/* Whether rows are multiplied in tiles: many, of 15 bits, by weights with one scale an output. */
static int in_tiles(const Linear *map, long rows, int parts) {
  return rows >= MANY && parts == 2 && map->bits == 8 && map->groups == 1 && map->inputs % DEPTH == 0 && has_tiles();
}

/* Bytes of `rows` rows in tiles. */
static size_t tile_bytes(const Linear *map, long rows) { return ceiling(rows, SIDE) * SIDE * (2 * map->inputs + sizeof(float)); }

static Split tiles_in(int8_t *room, const Linear *map, long rows) {
  return (Split){.cells = (Cell *)room, .step = (float *)(room + ceiling(rows, SIDE) * SIDE * 2 * map->inputs)};
}

/* x [rows, inputs] in `parts` bytes each, or one cell of 15 bits -> y [rows, outputs], both fp32; many rows in tiles. 0: done; 1: no memory. */
int malmoi_quantized_linear(const Linear *map, const float *x, float *y, long rows, int parts) {
  const int tiled = in_tiles(map, rows, parts);
  const long chunk = tiled ? WHOLE_CHUNK : CHUNK, most = at_most(rows, chunk);
  parts = (int)at_most(parts, PARTS);
  int8_t *room = scratch(tiled ? tile_bytes(map, most) : split_bytes(map, most, parts));
  if (!room) return 1;
  const Split cut = tiled ? tiles_in(room, map, most) : split_in(room, map, most, parts);
#pragma omp parallel if (rows * map->outputs * map->inputs > SERIAL)
  for (long first = 0; first < rows; first += chunk) {
    const long count = at_most(rows - first, chunk);
    const Target to = {y + first * map->outputs, count, NONE, 0};
#pragma omp for schedule(static)
    for (long r = 0; r < count; r++) (tiled ? split_tiles : split)(map, x + (first + r) * map->inputs, r, &cut);
    (tiled ? multiply_tiles : multiply)(map, &cut, &to);
  }
  return 0;
}
