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
/* Tokens belong to owners: those of owner e are order[starts[e] .. starts[e + 1]). */

/* grams[i] = sum over p of rows_i rows_j, for all j from the block of 2 V rows that i is in; `panel` has n * wide values. */
static void N(gram)(ptrdiff_t t, ptrdiff_t wide, ptrdiff_t n, const REAL *rows, REAL *panel, REAL *grams) {
    N(transpose)(t, n, rows, n, panel, wide);
    for (ptrdiff_t i = 0; i < t; i += 2 * V)
        N(product)(i + 2 * V < t ? 2 * V : t - i, wide - i, n, rows + i * n, n, 1, panel + i, 2 * V, wide,
                   grams + i * wide + i, wide, 0, 0);
}

static void N(gather)(ptrdiff_t t, ptrdiff_t n, const long *order, const REAL *from, REAL *to) {
    for (ptrdiff_t i = 0; i < t; i++)
        for (ptrdiff_t j = 0; j < n; j++) to[i * n + j] = from[order[i] * n + j];
}

/* squares[e] += the squared norm of the gradient that a linear layer has from the tokens of owner e, with inputs x and
   output gradients g; that of its bias is in it where `bias` is 1. Either by products between tokens (ghost norms) or,
   for many tokens, by the gradient itself. `room` has t (k + n) + max(k n, wide (max(k, n) + 2 t)) values, t being the
   most tokens of an owner and wide that in whole vectors. */
void N(linear_squares)(ptrdiff_t owners, ptrdiff_t n, ptrdiff_t k, const long *order, const long *starts, const REAL *x,
                       const REAL *g, ptrdiff_t bias, double *squares, REAL *room) {
    for (ptrdiff_t owner = 0; owner < owners; owner++) {
        ptrdiff_t t = starts[owner + 1] - starts[owner], wide = (t + V - 1) / V * V;
        const long *own = order + starts[owner];
        REAL *left = room, *right = left + t * k, *work = right + t * n;
        double sum = 0;
        N(gather)(t, k, own, x, left);
        N(gather)(t, n, own, g, right);
        if (t * (k + n) > 2 * k * n) {
            N(product)(n, k, t, right, 1, n, left, 2 * V, k, work, k, 0, 0);
            for (ptrdiff_t i = 0; i < n; i++) {
                REAL part = 0, total = 0;
                for (ptrdiff_t j = 0; j < k; j++) part += work[i * k + j] * work[i * k + j];
                for (ptrdiff_t j = 0; bias && j < t; j++) total += right[j * n + i];
                sum += (double)part + (double)total * total;
            }
        } else {
            REAL *first = work + (k > n ? k : n) * wide, *second = first + t * wide;
            N(gram)(t, wide, k, left, work, first);
            N(gram)(t, wide, n, right, work, second);
            for (ptrdiff_t i = 0; i < t; i++) {
                const REAL *a = first + i * wide, *b = second + i * wide;
                ptrdiff_t begin = i / (2 * V) * (2 * V), middle = begin + 2 * V < t ? begin + 2 * V : t;
                double near = 0, far = 0;
                for (ptrdiff_t j = begin; j < middle; j++) near += ((double)a[j] + bias) * b[j];
                for (ptrdiff_t j = middle; j < t; j++) far += ((double)a[j] + bias) * b[j];
                sum += near + 2 * far;
            }
        }
        squares[owner] += sum;
    }
}

/* squares[e] += those of the gradients of up to three tables with the same output gradients g, of which `ids` are the
   rows; a row `padding` of the first has none. `room` has t n + wide (n + t) values. */
void N(table_squares)(ptrdiff_t owners, ptrdiff_t n, const long *order, const long *starts, const long *first,
                      const long *second, const long *third, ptrdiff_t padding, const REAL *g, double *squares,
                      REAL *room) {
    for (ptrdiff_t owner = 0; owner < owners; owner++) {
        ptrdiff_t t = starts[owner + 1] - starts[owner], wide = (t + V - 1) / V * V;
        const long *own = order + starts[owner];
        REAL *rows = room, *work = rows + t * n, *grams = work + n * wide;
        double sum = 0;
        N(gather)(t, n, own, g, rows);
        N(gram)(t, wide, n, rows, work, grams);
        for (ptrdiff_t i = 0; i < t; i++) {
            ptrdiff_t begin = i / (2 * V) * (2 * V), middle = begin + 2 * V;
            for (ptrdiff_t j = begin; j < t; j++) {
                ptrdiff_t a = own[i], b = own[j], same = 0;
                if (first) same += first[a] == first[b] && first[a] != padding;
                if (second) same += second[a] == second[b];
                if (third) same += third[a] == third[b];
                sum += (double)(same * (j < middle ? 1 : 2)) * grams[i * wide + j];
            }
        }
        squares[owner] += sum;
    }
}

/* Sums of g over the tokens of each owner (by_bias, owners x n) and, with the inputs of a layer norm and their moments,
   of g times the normed inputs (by_weight). */
void N(owner_sums)(ptrdiff_t owners, ptrdiff_t n, const long *order, const long *starts, const REAL *restrict g,
                   const REAL *restrict sum, const REAL *restrict moments, REAL *restrict by_weight,
                   REAL *restrict by_bias) {
    for (ptrdiff_t owner = 0; owner < owners; owner++, by_bias += n) {
        for (ptrdiff_t i = 0; i < n; i++) by_bias[i] = 0;
        if (sum) for (ptrdiff_t i = 0; i < n; i++) by_weight[owner * n + i] = 0;
        for (ptrdiff_t at = starts[owner]; at < starts[owner + 1]; at++) {
            const REAL *by = g + order[at] * n;
            for (ptrdiff_t i = 0; i < n; i++) by_bias[i] += by[i];
            if (!sum) continue;
            const REAL *in = sum + order[at] * n;
            REAL mean = moments[2 * order[at]], inverse = moments[2 * order[at] + 1];
            for (ptrdiff_t i = 0; i < n; i++) by_weight[owner * n + i] += by[i] * ((in[i] - mean) * inverse);
        }
    }
}
#undef VEC
#undef LOAD
#undef STORE
