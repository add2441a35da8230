// CPU kernels of the engine: linear layers over packed weights and attention over the paged KV cache.
//
// Plain C with GCC vector extensions and a C ABI, so GCC builds it in seconds and ctypes calls it
// (which also frees the interpreter lock during the call). Accumulation is float32 everywhere, and the order of
// the additions for one output number never depends on how many rows are computed with it: a token's result is
// the same alone and in a batch.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VEC 16
#define PANEL 32                    // output columns packed together: two vectors
#if defined(__AVX512F__)
#define ROWS 14                     // 14 x 2 accumulators leave room for weights in 32 vector registers
#else
#define ROWS 2
#endif
#define MAX_HEAD_DIM 256
#define MAX_GROUP 8                 // query heads of one KV head that are computed together
#define INLINE static inline __attribute__((always_inline))

typedef float vecf __attribute__((vector_size(VEC * 4)));
typedef uint32_t vecu __attribute__((vector_size(VEC * 4)));
typedef float vecf_u __attribute__((vector_size(VEC * 4), aligned(4)));
typedef uint32_t vecu_u __attribute__((vector_size(VEC * 4), aligned(4)));

typedef int32_t veci __attribute__((vector_size(VEC * 4)));
typedef uint16_t vech_u __attribute__((vector_size(VEC * 2), aligned(2)));

INLINE vecf as_float(vecu bits) {
  vecf f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

INLINE vecu as_uint(vecf f) {
  vecu bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

INLINE float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN stays NaN
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE vecf splat(float s) { return (vecf){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }

// ---- linear -------------------------------------------------------------------------------------------------

// weight [n, k] -> packed [ceil(n / 32)][k][32]. A 32-bit lane of a bf16 panel holds column i below column i + 16,
// so that one shift and one mask widen 32 weights to float32.
void baton_pack_bf16(const uint16_t *weight, uint16_t *packed, int64_t n, int64_t k) {
  for (int64_t panel = 0; panel * PANEL < n; panel++)
    for (int64_t i = 0; i < k; i++)
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t col = panel * PANEL + (c / 2) + (c % 2) * VEC;
        packed[(panel * k + i) * PANEL + c] = col < n ? weight[col * k + i] : 0;
      }
}

void baton_pack_f32(const float *weight, float *packed, int64_t n, int64_t k) {
  for (int64_t panel = 0; panel * PANEL < n; panel++)
    for (int64_t i = 0; i < k; i++)
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t col = panel * PANEL + c;
        packed[(panel * k + i) * PANEL + c] = col < n ? weight[col * k + i] : 0.0f;
      }
}

INLINE void load_weights(const void *at, int is_bf16, vecf *w0, vecf *w1) {
  if (is_bf16) {
    vecu pair = *(const vecu_u *)at;
    *w0 = as_float(pair << 16);
    *w1 = as_float(pair & 0xffff0000u);
  } else {
    *w0 = ((const vecf_u *)at)[0];
    *w1 = ((const vecf_u *)at)[1];
  }
}

INLINE void store_columns(vecf acc, void *out, int is_bf16, int64_t columns, const float *bias) {
  if (columns == VEC) {
    if (bias) acc += *(const vecf_u *)bias;
    if (!is_bf16) {
      *(vecf_u *)out = acc;
      return;
    }
    const vecu bits = as_uint(acc);
    const vecu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vecu is_nan = (vecu)((bits & 0x7fffffffu) > 0x7f800000u);
    *(vech_u *)out = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), vech_u);
    return;
  }
  float v[VEC];
  memcpy(v, &acc, sizeof v);
  for (int64_t c = 0; c < columns; c++) {
    float f = bias ? v[c] + bias[c] : v[c];
    if (is_bf16) ((uint16_t *)out)[c] = float_to_bf16(f);
    else ((float *)out)[c] = f;
  }
}

// rows of x [rows, k] float32 times one panel -> out columns [col, col + 32) of out [., n]. Prefetches weights
// `ahead` bytes before they are used.
INLINE void panel_times_rows(const float *x, const char *panel, char *out, const float *bias, int64_t rows,
                             int64_t k, int64_t n, int64_t col, const char *next, int64_t step, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4;
  vecf acc[ROWS][2];
  for (int64_t r = 0; r < rows; r++) acc[r][0] = acc[r][1] = (vecf){0};
  for (int64_t i = 0; i < k; i++) {
    vecf w0, w1;
    const char *at = panel + i * PANEL * item;
    __builtin_prefetch(next + i * step, 0, 2);
    if (!is_bf16) __builtin_prefetch(next + i * step + 64, 0, 2);
    load_weights(at, is_bf16, &w0, &w1);
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; r++) {
      vecf xv = splat(x[r * k + i]);
      acc[r][0] += xv * w0;
      acc[r][1] += xv * w1;
    }
  }
  const int64_t left = n - col;
  for (int64_t r = 0; r < rows; r++) {
    char *to = out + (r * n + col) * item;
    store_columns(acc[r][0], to, is_bf16, left < VEC ? left : VEC, bias ? bias + col : NULL);
    if (left > VEC)
      store_columns(acc[r][1], to + VEC * item, is_bf16, left < PANEL ? left - VEC : VEC,
                    bias ? bias + col + VEC : NULL);
  }
}

#define ROW_CASE(R) case R: panel_times_rows(x, panel, out, bias, R, k, n, col, next, step, is_bf16); break;

INLINE void panel_times_block(const float *x, const char *panel, char *out, const float *bias, int64_t rows,
                              int64_t k, int64_t n, int64_t col, const char *next, int64_t step, int is_bf16) {
  switch (rows) {
    ROW_CASE(1) ROW_CASE(2)
#if ROWS > 2
    ROW_CASE(3) ROW_CASE(4) ROW_CASE(5) ROW_CASE(6) ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10)
    ROW_CASE(11) ROW_CASE(12) ROW_CASE(13) ROW_CASE(14)
#endif
  }
}

INLINE void linear(const float *x, const char *packed, char *out, const float *bias, int64_t m, int64_t k,
                   int64_t n, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4;
  const int64_t tile = 8 * ROWS;  // rows whose activations stay in the second-level cache
  for (int64_t top = 0; top < m; top += tile) {
    const int64_t in_tile = m - top < tile ? m - top : tile;
    const int64_t blocks = (in_tile + ROWS - 1) / ROWS;
    for (int64_t col = 0; col < n; col += PANEL) {
      const char *panel = packed + col * k * item;
      for (int64_t b = 0, row = 0; b < blocks; b++) {  // even blocks: 16 rows are 8 + 8, not 14 + 2
        const int64_t rows = (in_tile - row) / (blocks - b);
        // One block is bound by memory and fetches what it needs soon; several are bound by arithmetic and
        // share out the fetching of the next panel among them.
        const int64_t step = PANEL * item / blocks;
        const char *next = blocks == 1 ? panel + 4096 : panel + k * PANEL * item + b * k * step;
        panel_times_block(x + (top + row) * k, panel, out + (top + row) * n * item, bias, rows, k, n, col, next,
                          step, is_bf16);
        row += rows;
      }
    }
  }
}

// x [m, k] bf16, scratch [m, k] float32, out [m, n] bf16, bias [n] float32 or NULL.
void baton_linear_bf16(const uint16_t *x, const uint16_t *packed, uint16_t *out, const float *bias,
                       float *scratch, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m * k; i++) scratch[i] = bf16_to_float(x[i]);
  linear(scratch, (const char *)packed, (char *)out, bias, m, k, n, 1);
}

// x [m, k], out [m, n], bias [n] or NULL, all float32.
void baton_linear_f32(const float *x, const float *packed, float *out, const float *bias, int64_t m, int64_t k,
                      int64_t n) {
  linear(x, (const char *)packed, (char *)out, bias, m, k, n, 0);
}

// ---- attention over the paged KV cache ----------------------------------------------------------------------

INLINE vecf load_numbers(const void *at, int is_bf16) {
  if (!is_bf16) return *(const vecf_u *)at;
  return as_float(__builtin_convertvector(*(const vech_u *)at, vecu) << 16);
}

INLINE float sum_lanes(vecf v) {
  v += __builtin_shuffle(v, (veci){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, (veci){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, (veci){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  v += __builtin_shuffle(v, (veci){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
  return v[0];
}

// Lane i of the result is the sum of the lanes of v[i]: pairs of vectors are folded into one, four times.
INLINE vecf sum_sixteen(vecf v[VEC]) {
  const veci low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const veci low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const veci low2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  const veci low1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#define FOLD(COUNT, LOW, OFFSET) \
  _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) \
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], LOW) + __builtin_shuffle(v[2 * i], v[2 * i + 1], LOW + OFFSET);
  FOLD(8, low8, 8) FOLD(4, low4, 4) FOLD(2, low2, 2) FOLD(1, low1, 1)
#undef FOLD
  return v[0];
}

// exp for x <= 0: 2^n * 2^f with f in [-0.5, 0.5] by its Taylor polynomial of degree 6 (error below 2e-7).
INLINE vecf exp_negative(vecf x) {
  const vecf t = x * 1.44269504088896341f;
  const veci below = t < -126.0f;  // underflows to zero, -infinity too
  const vecf clamped = as_float((as_uint(t) & (vecu)~below) | (as_uint(splat(-126.0f)) & (vecu)below));
  const veci n = __builtin_convertvector(clamped - 0.5f, veci);  // rounds to nearest, as clamped <= 0
  const vecf f = (clamped - __builtin_convertvector(n, vecf)) * 0.693147180559945309f;
  vecf p = 1.0f + f * (1.0f / 6.0f);
  p = 1.0f + f * 0.2f * p;
  p = 1.0f + f * 0.25f * p;
  p = 1.0f + f * (1.0f / 3.0f) * p;
  p = 1.0f + f * 0.5f * p;
  p = 1.0f + f * p;
  const vecf power = as_float((vecu)(n + 127) << 23);
  return as_float(as_uint(p * power) & (vecu)~below);
}

// softmax of scores[0, count) in place, without the division; returns the sum. Room up to the next multiple of 16.
INLINE float softmax(float *scores, int64_t count) {
  float max = scores[0];
  for (int64_t i = 1; i < count; i++) max = scores[i] > max ? scores[i] : max;
  for (int64_t i = count; i % VEC; i++) scores[i] = -INFINITY;
  vecf sum = {0};
  for (int64_t i = 0; i < count; i += VEC) {
    vecf e = exp_negative(*(vecf_u *)(scores + i) - max);
    *(vecf_u *)(scores + i) = e;
    sum += e;
  }
  return sum_lanes(sum);
}

// Where things lie for one query token and one KV head, in numbers: token t's key at tokens[t] + head in the layer's
// part of the pool ([k/v, head, token, dim] in each block), its value `values` further.
struct head_view {
  const char *layer_base;
  const int64_t *tokens;
  int64_t head, values, context, head_dim;
};

INLINE const char *key_at(const struct head_view *h, int64_t token, int64_t item) {
  return h->layer_base + (h->tokens[token] + h->head) * item;
}

// scores[g * room + t] = scale * query[g] . key[t] for `group` heads; query [group, head_dim] float32.
INLINE void score_keys(const struct head_view *h, const float *query, float *scores, int64_t room, float scale,
                       int64_t group, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4, vectors = h->head_dim / VEC;
  float keys[VEC][MAX_HEAD_DIM];
  for (int64_t first = 0; first < h->context; first += VEC) {
    const int64_t count = h->context - first < VEC ? h->context - first : VEC;
    for (int64_t t = 0; t < VEC; t++) {
      const char *key = key_at(h, first + (t < count ? t : 0), item);
      const char *later = key_at(h, first + VEC + t < h->context ? first + VEC + t : first, item);
      for (int64_t line = 0; line < h->head_dim * item; line += 64) {
        __builtin_prefetch(later + line, 0, 3);                      // the next keys, and these keys' values,
        __builtin_prefetch(key + h->values * item + line, 0, 2);     // which blocks scatter too much for hardware
      }
      for (int64_t v = 0; v < vectors; v++)
        *(vecf_u *)(keys[t] + v * VEC) = load_numbers(key + v * VEC * item, is_bf16);
    }
    for (int64_t g = 0; g < group; g++) {
      vecf dots[VEC];
#pragma GCC unroll 16
      for (int64_t t = 0; t < VEC; t++) dots[t] = (vecf){0};
      for (int64_t v = 0; v < vectors; v++) {
        const vecf q = *(const vecf_u *)(query + g * h->head_dim + v * VEC);
#pragma GCC unroll 16
        for (int64_t t = 0; t < VEC; t++) dots[t] += q * *(const vecf_u *)(keys[t] + v * VEC);
      }
      *(vecf_u *)(scores + g * room + first) = sum_sixteen(dots) * scale;
    }
  }
}

// out[g] = norm[g] * sum over t of weights[g * room + t] * value[t], for `group` heads.
INLINE void sum_values(const struct head_view *h, const float *weights, int64_t room, const float *norm, char *out,
                       int64_t group, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4;
  for (int64_t v = 0; v < h->head_dim; v += 2 * VEC) {
    vecf sums[MAX_GROUP][2];
    for (int64_t g = 0; g < group; g++) sums[g][0] = sums[g][1] = (vecf){0};
    for (int64_t t = 0; t < h->context; t++) {
      const char *value = key_at(h, t, item) + (h->values + v) * item;
      const vecf v0 = load_numbers(value, is_bf16), v1 = load_numbers(value + VEC * item, is_bf16);
#pragma GCC unroll 8
      for (int64_t g = 0; g < group; g++) {
        const vecf w = splat(weights[g * room + t]);
        sums[g][0] += w * v0;
        sums[g][1] += w * v1;
      }
    }
    for (int64_t g = 0; g < group; g++) {
      char *to = out + (g * h->head_dim + v) * item;
      store_columns(sums[g][0] * norm[g], to, is_bf16, VEC, NULL);
      store_columns(sums[g][1] * norm[g], to + VEC * item, is_bf16, VEC, NULL);
    }
  }
}

#define GROUP_CASE(G) case G: sum_values(h, scores, room, norm, out, G, is_bf16); break;

// One query token, one KV head, `group` <= MAX_GROUP query heads of it.
INLINE void attend_head(const struct head_view *h, const char *q, int64_t q_head_stride, int64_t group, float scale,
                        float *scores, char *out, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4;
  const int64_t room = (h->context + VEC - 1) / VEC * VEC;
  float query[MAX_GROUP * MAX_HEAD_DIM], norm[MAX_GROUP];
  for (int64_t g = 0; g < group; g++)
    for (int64_t v = 0; v < h->head_dim; v += VEC)
      *(vecf_u *)(query + g * h->head_dim + v) = load_numbers(q + (g * q_head_stride + v) * item, is_bf16);
  score_keys(h, query, scores, room, scale, group, is_bf16);
  for (int64_t g = 0; g < group; g++) norm[g] = 1.0f / softmax(scores + g * room, h->context);
  switch (group) {
    GROUP_CASE(1) GROUP_CASE(2) GROUP_CASE(3) GROUP_CASE(4)
    GROUP_CASE(5) GROUP_CASE(6) GROUP_CASE(7) GROUP_CASE(8)
  }
}

// Attention of single query tokens, each over its own context. Strides count numbers, not bytes.
// q: token i, head h at q + i * q_token_stride + h * q_head_stride, head_dim contiguous numbers.
// layer_base: the layer's part of KV block 0, [k/v, head, token, dim]; block b lies b * block_stride further.
// tables [rows, table_width] int32 KV block ids; contexts [rows] int32 tokens attended; out [rows, heads, head_dim].
// head_dim a multiple of 32 up to 256; heads a multiple of kv_heads.
// scores: room for heads / kv_heads * (longest context rounded up to 16) float32; tokens: room for the
// longest context.
struct baton_attention {
  const void *q;
  void *layer_base;
  const int32_t *tables;
  const int32_t *contexts;
  float *scores;
  int64_t *tokens;
  void *out;
  int64_t rows, heads, kv_heads, head_dim, block_size, block_stride, table_width, q_token_stride, q_head_stride;
  float scale;
  int32_t is_bf16;
};

INLINE void attend(const struct baton_attention *a, int is_bf16) {
  const int64_t item = is_bf16 ? 2 : 4;
  const int64_t group = a->heads / a->kv_heads;
  const int64_t head_numbers = a->block_size * a->head_dim;
  for (int64_t row = 0; row < a->rows; row++) {
    const int64_t context = a->contexts[row];
    const int32_t *table = a->tables + row * a->table_width;
    for (int64_t first = 0; first < context; first += a->block_size, table++)
      for (int64_t t = first; t < context && t < first + a->block_size; t++)
        a->tokens[t] = *table * a->block_stride + (t - first) * a->head_dim;
    for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++) {
      const struct head_view view = {.layer_base = (const char *)a->layer_base, .tokens = a->tokens,
                                     .head = kv_head * head_numbers, .values = a->kv_heads * head_numbers,
                                     .context = context, .head_dim = a->head_dim};
      for (int64_t done = 0; done < group; done += MAX_GROUP) {
        const int64_t head = kv_head * group + done, left = group - done;
        attend_head(&view, (const char *)a->q + (row * a->q_token_stride + head * a->q_head_stride) * item,
                    a->q_head_stride, left < MAX_GROUP ? left : MAX_GROUP, a->scale, a->scores,
                    (char *)a->out + (row * a->heads + head) * a->head_dim * item, is_bf16);
      }
    }
  }
}

void baton_attention(const struct baton_attention *a) {
  if (a->is_bf16) attend(a, 1);
  else attend(a, 0);
}

// Stores keys and values of `tokens` tokens into the layer's part of their blocks: token i goes to slot slots[i] =
// block * block_size + offset. Sources: token i, head h at k + i * token_stride + h * head_stride.
struct baton_kv_store {
  const void *k, *v;
  void *layer_base;
  const int64_t *slots;
  int64_t tokens, kv_heads, head_dim, block_size, block_stride, k_token_stride, k_head_stride, v_token_stride,
      v_head_stride, item_bytes;
};

void baton_kv_store(const struct baton_kv_store *s) {
  const int64_t bytes = s->head_dim * s->item_bytes;
  for (int64_t t = 0; t < s->tokens; t++) {
    const int64_t block = s->slots[t] / s->block_size, offset = s->slots[t] % s->block_size;
    for (int64_t h = 0; h < s->kv_heads; h++) {
      char *to = (char *)s->layer_base +
                 (block * s->block_stride + (h * s->block_size + offset) * s->head_dim) * s->item_bytes;
      memcpy(to, (const char *)s->k + (t * s->k_token_stride + h * s->k_head_stride) * s->item_bytes, bytes);
      memcpy(to + s->kv_heads * s->block_size * bytes,
             (const char *)s->v + (t * s->v_token_stride + h * s->v_head_stride) * s->item_bytes, bytes);
    }
  }
}
