/* The kernels for one type: REAL, its name N(...) and V, the values in a vector of 64 bytes. */

typedef REAL N(vec) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
#define VEC N(vec)
#define LOAD(p) (*(const VEC *)(p))
#define STORE(p, v) (*(VEC *)(p) = (v))

/* ROWS x (WIDE vectors) of c = sum over p of a[i * ai + p * ak] * b[p * ldb + ...], onto what is there, a bias or 0. */
#define TILE(NAME, ROWS, WIDE)                                                                                        \
    static void N(NAME)(ptrdiff_t k, const REAL *a, ptrdiff_t ai, ptrdiff_t ak, const REAL *b, ptrdiff_t ldb,         \
                        REAL *c, ptrdiff_t ldc, const REAL *bias, int adds) {                                         \
        VEC sum[ROWS][WIDE];                                                                                          \
        _Pragma("GCC unroll 16") for (int i = 0; i < ROWS; i++)                                                       \
            _Pragma("GCC unroll 2") for (int j = 0; j < WIDE; j++)                                                    \
                sum[i][j] = adds ? LOAD(c + i * ldc + j * V) : bias ? LOAD(bias + j * V) : (VEC){0};                  \
        for (ptrdiff_t p = 0; p < k; p++) {                                                                           \
            VEC right[WIDE];                                                                                          \
            _Pragma("GCC unroll 2") for (int j = 0; j < WIDE; j++) right[j] = LOAD(b + j * V);                        \
            _Pragma("GCC unroll 16") for (int i = 0; i < ROWS; i++)                                                   \
                _Pragma("GCC unroll 2") for (int j = 0; j < WIDE; j++) sum[i][j] += a[i * ai] * right[j];             \
            a += ak;                                                                                                  \
            b += ldb;                                                                                                 \
        }                                                                                                             \
        _Pragma("GCC unroll 16") for (int i = 0; i < ROWS; i++)                                                       \
            _Pragma("GCC unroll 2") for (int j = 0; j < WIDE; j++) STORE(c + i * ldc + j * V, sum[i][j]);             \
    }
TILE(tile_12x2, 12, 2)
TILE(tile_4x2, 4, 2)
TILE(tile_1x2, 1, 2)
TILE(tile_12x1, 12, 1)
TILE(tile_4x1, 4, 1)
TILE(tile_1x1, 1, 1)
#undef TILE

/* c (m x n, n whole vectors) = a b; columns of two vectors of b are `panel` values apart. */
static void N(product)(ptrdiff_t m, ptrdiff_t n, ptrdiff_t k, const REAL *a, ptrdiff_t ai, ptrdiff_t ak, const REAL *b,
                       ptrdiff_t panel, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *bias, int adds) {
    for (ptrdiff_t first = 0; first < m; first += 96) {
        ptrdiff_t last = first + 96 < m ? first + 96 : m;
        for (ptrdiff_t j = 0; j < n; j += 2 * V) {
            const REAL *right = b + j / (2 * V) * panel, *start = bias ? bias + j : 0;
            int is_wide = j + 2 * V <= n;
            ptrdiff_t i = first;
#define ROWS_OF(NUMBER, WIDE, NARROW)                                                                                 \
    for (; i + NUMBER <= last; i += NUMBER)                                                                           \
        (is_wide ? N(WIDE) : N(NARROW))(k, a + i * ai, ai, ak, right, ldb, c + i * ldc + j, ldc, start, adds);
            ROWS_OF(12, tile_12x2, tile_12x1)
            ROWS_OF(4, tile_4x2, tile_4x1)
            ROWS_OF(1, tile_1x2, tile_1x1)
#undef ROWS_OF
        }
    }
}

/* V x V values, transposed in registers: bit by bit of its place, lane and row are exchanged. */
static inline void N(transpose_block)(const REAL *in, ptrdiff_t ldi, REAL *out, ptrdiff_t ldo) {
    typedef LANE lanes_t __attribute__((vector_size(64)));
    lanes_t lanes;
    VEC rows[V];
    for (int i = 0; i < V; i++) lanes[i] = i;
    _Pragma("GCC unroll 16") for (int i = 0; i < V; i++) rows[i] = LOAD(in + i * ldi);
    _Pragma("GCC unroll 4") for (int bit = 1; bit < V; bit *= 2) {
        lanes_t low = lanes + (((lanes & bit) != 0) & (V - bit)), high = low + bit;
        _Pragma("GCC unroll 16") for (int i = 0; i < V; i++)
            if (!(i & bit)) {
                VEC upper = rows[i], lower = rows[i + bit];
                rows[i] = __builtin_shuffle(upper, lower, low);
                rows[i + bit] = __builtin_shuffle(upper, lower, high);
            }
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < V; i++) STORE(out + i * ldo, rows[i]);
}

/* out (columns x ld) = the transpose of in (rows x columns), columns being whole vectors; columns of out that have no row
   are 0. */
static void N(transpose)(ptrdiff_t rows, ptrdiff_t columns, const REAL *in, ptrdiff_t ldi, REAL *out, ptrdiff_t ld) {
    ptrdiff_t whole = rows / V * V;
    for (ptrdiff_t p = 0; p < columns; p += V)
        for (ptrdiff_t i = 0; i < whole; i += V) N(transpose_block)(in + i * ldi + p, ldi, out + p * ld + i, ld);
    for (ptrdiff_t p = 0; p < columns && whole < ld; p++) {
        for (ptrdiff_t i = whole; i < rows; i++) out[p * ld + i] = in[i * ldi + p];
        for (ptrdiff_t i = rows; i < ld; i++) out[p * ld + i] = 0;
    }
}

/* y (t x n) = x (t x k) w' + bias; `packed` has room for w. */
void N(linear)(ptrdiff_t t, ptrdiff_t n, ptrdiff_t k, const REAL *x, const REAL *w, const REAL *bias, REAL *packed,
               REAL *y) {
    for (ptrdiff_t j = 0; j < n; j += 2 * V) N(transpose)(2 * V, k, w + j * k, k, packed + j * k, 2 * V);
    N(product)(t, n, k, x, k, 1, packed, 2 * V * k, 2 * V, y, n, bias, 0);
}

/* gx (t x k) = g (t x n) w, or that added to it. */
void N(linear_inputs)(ptrdiff_t t, ptrdiff_t n, ptrdiff_t k, const REAL *g, const REAL *w, REAL *gx, ptrdiff_t adds) {
    N(product)(t, k, n, g, n, 1, w, 2 * V, k, gx, k, 0, adds != 0);
}

/* gw (n x k) = g' x. */
void N(linear_values)(ptrdiff_t t, ptrdiff_t n, ptrdiff_t k, const REAL *g, const REAL *x, REAL *gw) {
    for (ptrdiff_t first = 0; first < t; first += 240)
        N(product)(n, k, first + 240 < t ? 240 : t - first, g + first * n, 1, n, x + first * k, 2 * V, k, gw, k, 0,
                   first > 0);
}

/* Attention within rows of `lengths` tokens. joint (tokens x 3 heads size) has q, k and v side by side; shares
   (rows x heads x width x width) gets the probabilities, which `mask` multiplies where there is one; `room` has
   (size + width) * width values. */
void N(attend)(ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size, ptrdiff_t width, const long *lengths, const REAL *joint,
               const REAL *mask, REAL *shares, REAL *mixed, REAL *room) {
    ptrdiff_t all = heads * size, token = 0;
    REAL scale = 1 / N(root)(size), *used = room + size * width;
    for (ptrdiff_t row = 0; row < rows; token += lengths[row++])
        for (ptrdiff_t head = 0; head < heads; head++, shares += width * width) {
            ptrdiff_t length = lengths[row], wide = (length + V - 1) / V * V;
            const REAL *q = joint + token * 3 * all + head * size, *k = q + all, *v = k + all;
            N(transpose)(length, size, k, 3 * all, room, wide);
            N(product)(length, wide, size, q, 3 * all, 1, room, 2 * V, wide, shares, width, 0, 0);
            for (ptrdiff_t i = 0; i < length; i++) {
                REAL *own = shares + i * width, most = own[0], sum = 0;
                for (ptrdiff_t j = 1; j < length; j++) most = own[j] > most ? own[j] : most;
                for (ptrdiff_t j = 0; j < length; j++) own[j] = N(power)((own[j] - most) * scale);
                for (ptrdiff_t j = 0; j < length; j++) sum += own[j];
                sum = 1 / sum;
                for (ptrdiff_t j = 0; j < length; j++) own[j] *= sum;
            }
            const REAL *left = shares;
            if (mask) {
                const REAL *kept = mask + (row * heads + head) * width * width;
                for (ptrdiff_t i = 0; i < length; i++)
                    for (ptrdiff_t j = 0; j < length; j++) used[i * width + j] = shares[i * width + j] * kept[i * width + j];
                left = used;
            }
            N(product)(length, size, length, left, width, 1, v, 2 * V, 3 * all, mixed + token * all + head * size, all, 0, 0);
        }
}

/* The gradient of joint from that of mixed; `room` has (size + 2 * width) * width values. */
void N(attend_backward)(ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size, ptrdiff_t width, const long *lengths,
                        const REAL *joint, const REAL *mask, const REAL *shares, const REAL *by_mixed, REAL *by_joint,
                        REAL *room) {
    ptrdiff_t all = heads * size, token = 0;
    REAL scale = 1 / N(root)(size), *by_score = room + size * width, *used = by_score + width * width;
    for (ptrdiff_t row = 0; row < rows; token += lengths[row++])
        for (ptrdiff_t head = 0; head < heads; head++, shares += width * width) {
            ptrdiff_t length = lengths[row], wide = (length + V - 1) / V * V;
            ptrdiff_t place = token * 3 * all + head * size;
            const REAL *q = joint + place, *k = q + all, *v = k + all, *g = by_mixed + token * all + head * size;
            const REAL *kept = mask ? mask + (row * heads + head) * width * width : 0;
            N(transpose)(length, size, v, 3 * all, room, wide);
            N(product)(length, wide, size, g, all, 1, room, 2 * V, wide, by_score, width, 0, 0);
            for (ptrdiff_t i = 0; i < length; i++) {
                const REAL *own = shares + i * width;
                REAL *by = by_score + i * width, *out = used + i * width, sum = 0;
                for (ptrdiff_t j = 0; j < length; j++) {
                    REAL factor = kept ? kept[i * width + j] : 1;
                    out[j] = own[j] * factor;
                    by[j] *= out[j];
                }
                for (ptrdiff_t j = 0; j < length; j++) sum += by[j];
                for (ptrdiff_t j = 0; j < length; j++) by[j] = (by[j] - own[j] * sum) * scale;
            }
            N(product)(length, size, length, used, 1, width, g, 2 * V, all, by_joint + place + 2 * all, 3 * all, 0, 0);
            N(product)(length, size, length, by_score, width, 1, k, 2 * V, 3 * all, by_joint + place, 3 * all, 0, 0);
            N(product)(length, size, length, by_score, 1, width, q, 2 * V, 3 * all, by_joint + place + all, 3 * all, 0, 0);
        }
}

static REAL N(dot)(ptrdiff_t n, const REAL *restrict a, const REAL *restrict b) {
    REAL sum = 0;
    for (ptrdiff_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void N(add_scaled)(ptrdiff_t n, REAL factor, const REAL *restrict a, REAL *restrict to) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] += factor * a[i];
}

/* Attention of each row's first token to all of its row, keys and values never formed: `seen` (rows x heads x n) is the
   query as seen by the hidden states, `means` their mean by the shares, `totals` (rows x heads) the shares' sums. Shares
   and the mask are rows x heads x width; `room` has n * size values. */
void N(first_attend)(ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size, ptrdiff_t width, const long *lengths,
                     const REAL *hidden, const REAL *query, const REAL *key, const REAL *key_bias, const REAL *value,
                     const REAL *value_bias, const REAL *mask, REAL *seen, REAL *shares, REAL *means, REAL *totals,
                     REAL *mixed, REAL *room) {
    ptrdiff_t n = heads * size;
    REAL scale = 1 / N(root)(size);
    for (ptrdiff_t head = 0; head < heads; head++)
        N(product)(rows, n, size, query + head * size, n, 1, key + head * size * n, 2 * V, n, seen + head * n, heads * n, 0, 0);
    for (ptrdiff_t row = 0, at = 0; row < rows; hidden += lengths[row++] * n)
        for (ptrdiff_t head = 0; head < heads; head++, at++) {
            ptrdiff_t length = lengths[row];
            REAL *own = shares + at * width, *mean = means + at * n, sum = 0;
            REAL constant = N(dot)(size, query + at * size, key_bias + head * size);
            for (ptrdiff_t j = 0; j < length; j++) own[j] = (N(dot)(n, seen + at * n, hidden + j * n) + constant) * scale;
            REAL most = own[0];
            for (ptrdiff_t j = 1; j < length; j++) most = own[j] > most ? own[j] : most;
            for (ptrdiff_t j = 0; j < length; j++) own[j] = N(power)(own[j] - most);
            for (ptrdiff_t j = 0; j < length; j++) sum += own[j];
            for (ptrdiff_t j = 0; j < length; j++) own[j] /= sum;
            for (ptrdiff_t i = 0; i < n; i++) mean[i] = 0;
            totals[at] = 0;
            for (ptrdiff_t j = 0; j < length; j++) {
                REAL used = mask ? own[j] * mask[at * width + j] : own[j];
                totals[at] += used;
                N(add_scaled)(n, used, hidden + j * n, mean);
            }
        }
    for (ptrdiff_t head = 0; head < heads; head++) {
        N(transpose)(size, n, value + head * size * n, n, room, size);
        N(product)(rows, size, n, means + head * n, heads * n, 1, room, 2 * V, size, mixed + head * size, n, 0, 0);
    }
    for (ptrdiff_t at = 0; at < rows * heads; at++)
        N(add_scaled)(size, totals[at], value_bias + at % heads * size, mixed + at * size);
}

/* All gradients from that of mixed; `by_means` and `by_seen` are as large as `seen`, `room` has n * size + width values. */
void N(first_attend_backward)(ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size, ptrdiff_t width, const long *lengths,
                              const REAL *hidden, const REAL *query, const REAL *key, const REAL *key_bias,
                              const REAL *value, const REAL *value_bias, const REAL *mask, const REAL *seen,
                              const REAL *shares, const REAL *means, const REAL *totals, const REAL *by_mixed,
                              REAL *by_hidden, REAL *by_query, REAL *by_key, REAL *by_key_bias, REAL *by_value,
                              REAL *by_value_bias, REAL *by_means, REAL *by_seen, REAL *room) {
    ptrdiff_t n = heads * size;
    REAL scale = 1 / N(root)(size), *by_score = room + n * size;
    for (ptrdiff_t i = 0; i < n; i++) by_key_bias[i] = by_value_bias[i] = 0;
    for (ptrdiff_t head = 0; head < heads; head++) {
        const REAL *g = by_mixed + head * size;
        N(product)(size, n, rows, g, 1, n, means + head * n, 2 * V, heads * n, by_value + head * size * n, n, 0, 0);
        N(product)(rows, n, size, g, n, 1, value + head * size * n, 2 * V, n, by_means + head * n, heads * n, 0, 0);
    }
    for (ptrdiff_t row = 0, at = 0; row < rows; row++) {
        ptrdiff_t length = lengths[row];
        for (ptrdiff_t i = 0; i < length * n; i++) by_hidden[i] = 0;
        for (ptrdiff_t head = 0; head < heads; head++, at++) {
            const REAL *own = shares + at * width, *kept = mask ? mask + at * width : 0;
            REAL by_total = N(dot)(size, by_mixed + at * size, value_bias + head * size), sum = 0, by_constant = 0;
            N(add_scaled)(size, totals[at], by_mixed + at * size, by_value_bias + head * size);
            for (ptrdiff_t j = 0; j < length; j++) {
                REAL factor = kept ? kept[j] : 1;
                by_score[j] = (N(dot)(n, by_means + at * n, hidden + j * n) + by_total) * factor * own[j];
                N(add_scaled)(n, own[j] * factor, by_means + at * n, by_hidden + j * n);
            }
            for (ptrdiff_t j = 0; j < length; j++) sum += by_score[j];
            for (ptrdiff_t j = 0; j < length; j++) by_score[j] = (by_score[j] - own[j] * sum) * scale;
            for (ptrdiff_t i = 0; i < n; i++) by_seen[at * n + i] = 0;
            for (ptrdiff_t j = 0; j < length; j++) {
                by_constant += by_score[j];
                N(add_scaled)(n, by_score[j], seen + at * n, by_hidden + j * n);
                N(add_scaled)(n, by_score[j], hidden + j * n, by_seen + at * n);
            }
            N(add_scaled)(size, by_constant, query + at * size, by_key_bias + head * size);
            for (ptrdiff_t i = 0; i < size; i++) by_query[at * size + i] = by_constant * key_bias[head * size + i];
        }
        hidden += length * n;
        by_hidden += length * n;
    }
    for (ptrdiff_t head = 0; head < heads; head++) {
        const REAL *by = by_seen + head * n;
        N(product)(size, n, rows, query + head * size, 1, n, by, 2 * V, heads * n, by_key + head * size * n, n, 0, 0);
        N(transpose)(size, n, key + head * size * n, n, room, size);
        N(product)(rows, size, n, by, heads * n, 1, room, 2 * V, size, by_query + head * size, n, 0, 1);
    }
}

/* sum = hidden + sum * mask, out = its layer norm; `moments` gets each row's mean and inverse deviation. */
void N(add_norm)(ptrdiff_t rows, ptrdiff_t n, REAL *restrict sum, const REAL *restrict hidden, const REAL *restrict mask, const REAL *restrict weight,
                 const REAL *restrict bias, REAL epsilon, REAL *restrict out, REAL *restrict moments) {
    for (ptrdiff_t row = 0; row < rows; row++, sum += n, out += n, moments += 2) {
        REAL total = 0, square = 0;
        if (hidden) for (ptrdiff_t i = 0; i < n; i++) sum[i] = hidden[row * n + i] + sum[i] * (mask ? mask[row * n + i] : 1);
        for (ptrdiff_t i = 0; i < n; i++) total += sum[i];
        REAL mean = total / n;
        for (ptrdiff_t i = 0; i < n; i++) square += (sum[i] - mean) * (sum[i] - mean);
        REAL inverse = 1 / N(root)(square / n + epsilon);
        for (ptrdiff_t i = 0; i < n; i++) out[i] = (sum[i] - mean) * inverse * weight[i] + bias[i];
        moments[0] = mean;
        moments[1] = inverse;
    }
}

/* The gradients of the sum, of what the mask multiplied (where `by_added` is given), and of weight and bias. */
void N(norm_backward)(ptrdiff_t rows, ptrdiff_t n, const REAL *restrict g, const REAL *restrict sum, const REAL *restrict moments,
                      const REAL *restrict weight, const REAL *restrict mask, REAL *restrict by_sum, REAL *restrict by_added, REAL *restrict by_weight,
                      REAL *restrict by_bias) {
    for (ptrdiff_t i = 0; i < n; i++) by_weight[i] = by_bias[i] = 0;
    for (ptrdiff_t row = 0; row < rows; row++, g += n, sum += n, by_sum += n, moments += 2) {
        REAL mean = moments[0], inverse = moments[1], first = 0, second = 0;
        for (ptrdiff_t i = 0; i < n; i++) {
            REAL unit = (sum[i] - mean) * inverse;
            by_weight[i] += g[i] * unit;
            by_bias[i] += g[i];
            first += g[i] * weight[i];
            second += g[i] * weight[i] * unit;
        }
        first /= n;
        second /= n;
        for (ptrdiff_t i = 0; i < n; i++)
            by_sum[i] = (g[i] * weight[i] - first - (sum[i] - mean) * inverse * second) * inverse;
        if (by_added)
            for (ptrdiff_t i = 0; i < n; i++) by_added[row * n + i] = by_sum[i] * mask[row * n + i];
    }
}
#undef VEC
#undef LOAD
#undef STORE
