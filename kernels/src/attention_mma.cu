// Causal self-attention on tensor cores, for FP16 and BF16: the counterpart of attention.rs.
//
// A block keeps 64 resident rows, 16 per warp, and iterates over tiles of the rows that these combine with, in shared
// memory; the next tile is copied during the work on the current one (Dao, "FlashAttention-2", 2023). Scores exist only
// in registers, for a warp's rows and 16 to 64 columns at a time: the result fragments of one matmul, rounded to the
// operands' type, are the operand of the next. Sums, softmax and the running output are FP32. The backward pass is one
// template with two instances, resident queries and resident keys: each result has one writer and the sums have a fixed
// order, but the scores are computed twice. A block of keys takes the heads of queries that share them in turn.
//
// Blocks per multiprocessor for heads of 32, 64, 96, 128 and 256 elements, limited by registers (nvcc 13.0, sm_90, no
// spills): 4, 3, 3, 2, 2 forward, 3, 3, 2, 2, 2 for keys and values, 4, 4, 4, 3, 2 for queries. Shared memory, 20 to 99
// KiB per block, is not the limit on an H100. Heads of 256 take two blocks for a tile of keys, each with half of the
// gradients' columns, because their sums do not fit into the registers of one.
#include "cuda/attention.cuh"
#include "cuda/tensor_core.cuh"

namespace {

// attention_wgmma.cu includes this file for GPUs with products of four warps, which read operands from shared memory.
#ifdef WARPGROUPS
constexpr bool WGMMA = true;
#define SYMBOL(kernel, type, size) kernel##_wgmma_##type##_##size
#else
constexpr bool WGMMA = false;
#define SYMBOL(kernel, type, size) kernel##_##type##_##size
#endif

constexpr unsigned WARPS = 4, THREADS = WARPS * WARP;
constexpr int WARP_ROWS = 16, ROWS = WARPS * WARP_ROWS;
// Rows that have the same work: products of four warps are for all rows of a block.
constexpr int SPAN = WGMMA ? ROWS : WARP_ROWS;
constexpr float LOG2_E = 1.4426950408889634f;

// The factor of a score that `cap` returns.
__device__ inline float factor_of_scores(const ShapeArgs& shape) { return shape.softcap == 0.0f ? shape.softmax_scale : shape.softcap; }
// Calls `f` for each element of a lane.
template <int N, class F> __device__ inline void for_scores(const float (&)[N][4], F f) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(j, i);
}
// The column of a lane's element.
__device__ inline unsigned column_of(int j, int i) { return 8 * j + threadIdx.x % WARP % 4 * 2 + i % 2; }
// Caps products of queries and keys, up to that factor.
template <int N> __device__ inline void cap(const ShapeArgs& shape, float (&products)[N][4]) {
    if (shape.softcap == 0.0f) return;
    const float scale = 2.0f * LOG2_E * shape.softmax_scale * fast_reciprocal(shape.softcap);
    // tanh, with an absolute error of a rounding, in fewer registers than CUDA's.
    for_scores(products, [&](int j, int i) { products[j][i] = 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp2(products[j][i] * scale)); });
}

// Tiles of one head of one sequence, for heads of up to SIZE elements: rows of T, with zeros outside the sequence and
// the head.
template <class T, int SIZE> struct Tiles {
    static constexpr int CHUNK = 16 / sizeof(T);  // elements per copy
    // Elements of memory for a row, and from one row to the next. Eight consecutive rows of a column have different
    // banks: by an additional chunk per row, or, as products of four warps need it, by an order of chunks that depends
    // on the row, in columns of 64.
    static constexpr int ROW = WGMMA ? SIZE : SIZE + CHUNK, LD = WGMMA ? 64 : ROW;

    const ShapeArgs& shape;
    const unsigned lane;

    __device__ explicit Tiles(const ShapeArgs& shape) : shape(shape), lane(threadIdx.x % WARP) {}

    // The offset of an element in a tile of N rows.
    template <int N> __device__ static unsigned place(unsigned row, unsigned column) {
        if constexpr (!WGMMA) return row * LD + column;
        return (column / LD * N + row) * LD + (column % LD / CHUNK ^ row % 8) * CHUNK + column % CHUNK;
    }

    // Starts copying N rows of a head, beginning with `first`, into a tile.
    template <int N> __device__ void fetch(const Rows& rows, unsigned head, unsigned first, T* tile) const {
        // A thread copies the same columns of every STEP-th row; otherwise addresses would take more instructions than
        // matmuls.
        constexpr unsigned LANES = SIZE <= 32 ? 4 : SIZE <= 64 ? 8 : SIZE <= 128 ? 16 : 32, STEP = THREADS / LANES;
        static_assert(SIZE <= LANES * CHUNK && N % STEP == 0, "each row has its threads, and each thread as many rows");
        static_assert(!WGMMA || STEP % 8 == 0, "a thread's rows have the same order of chunks");
        const unsigned begin = threadIdx.x / LANES, d = threadIdx.x % LANES * CHUNK;
        if (d >= SIZE) return;
        const T* source = static_cast<const T*>(rows.first) + shape.at(rows, head, first + begin) + d;
        T* target = tile + place<N>(begin, d);
        const size_t step = static_cast<size_t>(STEP) * rows.stride;
        const unsigned rows_inside = d < shape.head_size && first + begin < shape.seq_len ? shape.seq_len - first - begin : 0;
        // Two loops, because a branch for each copy takes longer than the copy.
        if (shape.whole) {
#pragma unroll
            for (unsigned r = 0; r < N; r += STEP) copy_async<16>(target + r * LD, source + r / STEP * step, r < rows_inside);
            return;
        }
#pragma unroll 1
        for (unsigned r = 0; r < N; r += STEP, source += step, target += STEP * LD) {
            for (unsigned k = 0; k < CHUNK; ++k) {
                target[k] = r < rows_inside && d + k < shape.head_size ? load(source, k) : from_float<T>(0.0f);
            }
        }
    }

    // This lane's address for loading 16 × 16 elements of a tile, transposed, as two right operands.
    __device__ const T* by_columns(const T* tile) const { return tile + lane % 16 * LD + lane / 16 * 8; }
    // This lane's address for loading 16 × 16 elements as two right operands that are their transposes.
    __device__ const T* by_rows(const T* tile) const { return tile + (lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8; }

    // out += p · tile, for a warp's p [16, 8·N], rounded to T, and 8·N rows and 8·M columns of a tile of ROWS_OF_TILE
    // rows; skips groups of 16 rows that are `hidden`.
    template <int ROWS_OF_TILE, int N, int M, class Hidden>
    __device__ void fold(const float (&p)[N][4], const T* tile, Hidden hidden, float (&out)[M][4]) const {
        unsigned lefts[N / 2][4];
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            const float(&even)[4] = p[2 * j];
            const float(&odd)[4] = p[2 * j + 1];
            lefts[j][0] = pack_pair<T>(even[0], even[1]), lefts[j][1] = pack_pair<T>(even[2], even[3]);
            lefts[j][2] = pack_pair<T>(odd[0], odd[1]), lefts[j][3] = pack_pair<T>(odd[2], odd[3]);
        }
        if constexpr (WGMMA) {
            const Described right = describe_matrix(tile, ROWS_OF_TILE * LD * sizeof(T));
            begin_products(out);
#pragma unroll
            for (int j = 0; j < N / 2; ++j) {
                warpgroup_multiply<T, true>(out, lefts[j], advance(right, 16 * j * LD * sizeof(T)), true);
            }
            commit_products();
            wait_for_products<0>(out);
            return;
        }
        const T* place = by_columns(tile);
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            if (hidden(16 * j)) continue;
            const unsigned(&left)[4] = lefts[j];
#pragma unroll
            for (int d = 0; d < M / 2; ++d) {
                unsigned right[4];
                load_transposed(right, place + 16 * j * LD + 16 * d);
                multiply_add<T>(out[2 * d], left, right[0], right[1]);
                multiply_add<T>(out[2 * d + 1], left, right[2], right[3]);
            }
        }
    }

    // Stores 8·M columns, beginning with `column`, of a warp's 16 rows of a result, each half times its factor, through
    // `place`, shared memory for the rows.
    template <int M>
    __device__ void store_rows(T* place, const Rows& rows, unsigned head, unsigned first, unsigned column, const float (&values)[M][4],
                               const float (&factors)[2]) const {
        constexpr int CHUNKS = 8 * M / CHUNK;
#pragma unroll
        for (int j = 0; j < M; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float factor = factors[half];
                *reinterpret_cast<unsigned*>(place + (lane / 4 + 8 * half) * ROW + 8 * j + lane % 4 * 2) =
                    pack_pair<T>(values[j][2 * half] * factor, values[j][2 * half + 1] * factor);
            }
        }
        __syncwarp();
        for (unsigned i = lane; i < WARP_ROWS * CHUNKS; i += WARP) {
            const unsigned r = i / CHUNKS, d = i % CHUNKS * CHUNK, begin = column + d;
            if (first + r >= shape.seq_len || begin >= shape.head_size) continue;
            T* target = static_cast<T*>(rows.first) + shape.at(rows, head, first + r) + begin;
            if (shape.whole) {
                CHECK_WRITE(target, 16);
                *reinterpret_cast<Pack<T, CHUNK>*>(target) = *reinterpret_cast<const Pack<T, CHUNK>*>(place + r * ROW + d);
            } else {
                for (unsigned k = 0; k < CHUNK && begin + k < shape.head_size; ++k) store(target, k, place[r * ROW + d + k]);
            }
        }
        __syncwarp();
    }
};

// A warp's 16 rows of a tile of ROWS as left operands of matmuls over the head: held in registers, or, if registers are
// scarce, loaded for each use.
template <class T, int SIZE, bool HELD> struct Left {
    const T* tile = nullptr;
    unsigned held[HELD ? SIZE / 16 : 1][4];

    __device__ const T* place(unsigned lane, int step) const {
        return tile + Tiles<T, SIZE>::template place<ROWS>(threadIdx.x / WARP * WARP_ROWS + lane % 16, 16 * step + lane / 16 * 8);
    }

    __device__ void take(const Tiles<T, SIZE>& tiles, const T* from) {
        tile = from;
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < SIZE / 16; ++i) load_matrices(held[i], place(tiles.lane, i));
        }
    }

    // Starts computing out = these rows · Nᵀ rows of a tile of ROWS_OF_TILE rows by four warps.
    template <int ROWS_OF_TILE, int N> __device__ void start_scores(const T* other, float (&out)[N / 8][4]) const {
        constexpr int LD = Tiles<T, SIZE>::LD;
        const auto bytes = [](int d, int rows) { return (16 * d / LD * rows * LD + 16 * d % LD) * sizeof(T); };
        const Described right = describe_matrix(other, 0);
        begin_products(out);
#pragma unroll
        for (int d = 0; d < SIZE / 16; ++d) {
            if constexpr (HELD) {
                warpgroup_multiply<T, false>(out, held[d], advance(right, bytes(d, ROWS_OF_TILE)), d > 0);
            } else {
                warpgroup_multiply<T>(out, advance(describe_matrix(tile, 0), bytes(d, ROWS)), advance(right, bytes(d, ROWS_OF_TILE)), d > 0);
            }
        }
        commit_products();
    }

    // out = these rows · the tile's first Nᵀ; 16 columns are left at zero if they are `hidden`.
    template <int N, class Hidden>
    __device__ void scores(const Tiles<T, SIZE>& tiles, const T* tile, Hidden hidden, float (&out)[N / 8][4]) const {
        const T* columns = tiles.by_rows(tile);
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j][i] = 0.0f;
#pragma unroll
        for (int d = 0; d < SIZE / 16; ++d) {
            unsigned left[4];
            if constexpr (HELD) {
#pragma unroll
                for (int i = 0; i < 4; ++i) left[i] = held[d][i];
            } else {
                load_matrices(left, place(tiles.lane, d));
            }
#pragma unroll
            for (int j = 0; j < N / 16; ++j) {
                if (hidden(16 * j)) continue;
                unsigned right[4];
                load_matrices(right, columns + 16 * j * Tiles<T, SIZE>::LD + 16 * d);
                multiply_add<T>(out[2 * j], left, right[0], right[1]);
                multiply_add<T>(out[2 * j + 1], left, right[2], right[3]);
            }
        }
    }
};

// Reductions over the four lanes that share a row of a matmul's result.
__device__ inline float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(EVERY_LANE, value, 1));
    return fmaxf(value, __shfl_xor_sync(EVERY_LANE, value, 2));
}
__device__ inline float row_sum(float value) {
    value += __shfl_xor_sync(EVERY_LANE, value, 1);
    return value + __shfl_xor_sync(EVERY_LANE, value, 2);
}

// A bit for each of four neighbors that share a draw: 1 if dropout keeps it.
__device__ inline unsigned kept_of_draw(const Dropout& dropout, size_t block) {
    const Words words = draw_block(dropout, block);
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (words.at[i] >= dropout.threshold) bits |= 1u << i;
    }
    return bits;
}

// A bit for each of a lane's four scores, of 16 × 8 scores, the first of index `first` in the mask: 1 if dropout keeps
// it. The rows are keys or queries.
template <bool KEYS_AT_REST> __device__ inline unsigned kept_of_scores(const Dropout& dropout, unsigned seq_len, size_t first) {
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned bits = 0;
#pragma unroll 1
    for (unsigned i = 0; i < 4; ++i) {
        const size_t row = g + i / 2 * 8, column = 2 * t + i % 2;
        const size_t index = first + (KEYS_AT_REST ? column * seq_len + row : row * seq_len + column);
        bits |= (kept_of_draw(dropout, index / 4) >> index % 4 & 1) << i;
    }
    return bits;
}

// [`kept_of_scores`] if the sequence length is four times `quarter`, and `first` is the index of a draw: lanes share
// their draws, so that none is repeated.
template <bool KEYS_AT_REST> __device__ inline unsigned kept_of_tile(const Dropout& dropout, unsigned quarter, unsigned first) {
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned bits = 0;
    if (KEYS_AT_REST) {
        // Four lanes hold four keys of the same queries. Each draws for one pair of query and half.
        const unsigned turn = g % 4;
        const unsigned drawn = kept_of_draw(dropout, first + (2 * t + turn % 2) * quarter + g / 4 + turn / 2 * 2);
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) bits |= (__shfl_sync(EVERY_LANE, drawn, g / 4 * 16 + i * 4 + t) >> turn & 1) << i;
    } else {
        // Two lanes hold four keys of the same two queries. Each draws for one of the queries.
        const unsigned odd = t % 2;
        const unsigned drawn = kept_of_draw(dropout, first + (g + 8 * odd) * quarter + t / 2);
        const unsigned other = __shfl_xor_sync(EVERY_LANE, drawn, 1);
        bits = ((odd ? other : drawn) >> 2 * odd & 3) | ((odd ? drawn : other) >> 2 * odd & 3) << 2;
    }
    return bits;
}

// [`kept_of_scores`] for `count` tiles of 8 columns, four bits each, lowest first. Not unrolled: a draw is many
// instructions.
template <bool KEYS_AT_REST> __device__ inline unsigned kept(const Dropout& dropout, unsigned seq_len, size_t first, unsigned count) {
    unsigned bits = 0;
    if (seq_len % 4 == 0) {
        unsigned draw = first / 4;
#pragma unroll 1
        for (unsigned j = 0; j < count; ++j, draw += KEYS_AT_REST ? 2 * seq_len : 2) {
            bits |= kept_of_tile<KEYS_AT_REST>(dropout, seq_len / 4, draw) << 4 * j;
        }
        return bits;
    }
#pragma unroll 1
    for (unsigned j = 0; j < count; ++j, first += KEYS_AT_REST ? 8 * static_cast<size_t>(seq_len) : 8) {
        bits |= kept_of_scores<KEYS_AT_REST>(dropout, seq_len, first) << 4 * j;
    }
    return bits;
}

// A warp's queries, with their running output, maximum and sum over the keys so far.
template <class T, int SIZE> struct Queries {
    static constexpr bool HELD = SIZE <= 128;
    static constexpr int KEYS = HELD ? 64 : 32;  // of a tile

    const AttentionForward& a;
    const Tiles<T, SIZE>& tiles;
    const unsigned first;  // query
    Left<T, SIZE, HELD> left;
    float out[SIZE / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};

    template <bool MASKED> __device__ void meet(unsigned key, const T* keys, const T* values) {
        const unsigned lane = tiles.lane;
        const unsigned least = MASKED ? a.shape.first_key(first) : 0;
        const auto hidden = [&](unsigned column) {
            return MASKED && (key + column > first + WARP_ROWS - 1 || key + column + 16 <= least);
        };
        float s[KEYS / 8][4];
        if constexpr (WGMMA) {
            left.template start_scores<KEYS, KEYS>(keys, s);
            wait_for_products<0>(s);
        } else {
            left.template scores<KEYS>(tiles, keys, hidden, s);
        }
        cap(a.shape, s);
        if constexpr (MASKED) {
            const unsigned row = first + lane / 4, bounds[2] = {a.shape.first_key(row), a.shape.first_key(row + 8)};
            for_scores(s, [&](int j, int i) {
                const unsigned column = key + column_of(j, i);
                if (column > row + i / 2 * 8 || column < bounds[i / 2]) s[j][i] = -INFINITY;
            });
        }
        const float scale = factor_of_scores(a.shape) * LOG2_E;
        // Two chains for each of a lane's rows, because a chain of dependent instructions waits for each.
        float highest[2][2] = {{top[0], -INFINITY}, {top[1], -INFINITY}}, sums[2][2] = {}, shrink[2], offset[2];
        for_scores(s, [&](int j, int i) { highest[i / 2][j % 2] = fmaxf(highest[i / 2][j % 2], s[j][i]); });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float most = row_max(fmaxf(highest[half][0], highest[half][1]));
            // Before a row's first visible key its maximum is -∞, and -∞ - (-∞) would be NaN.
            const float base = most == -INFINITY ? 0.0f : most;
            shrink[half] = fast_exp2((top[half] - base) * scale), offset[half] = base * scale;
            top[half] = most;
        }
        for_scores(s, [&](int j, int i) {
            s[j][i] = fast_exp2(s[j][i] * scale - offset[i / 2]);
            sums[i / 2][j % 2] += s[j][i];
        });
        // This lane's parts; `attend` adds those of a row's four lanes.
        for (int half = 0; half < 2; ++half) total[half] = total[half] * shrink[half] + (sums[half][0] + sums[half][1]);
        // The maxima seldom change.
        if (__ballot_sync(EVERY_LANE, shrink[0] != 1.0f || shrink[1] != 1.0f) != 0) {
            for_scores(out, [&](int j, int i) { out[j][i] *= shrink[i / 2]; });
        }
        if (a.dropout.threshold != 0) {
            const unsigned count = MASKED ? min(KEYS / 8u, (first + WARP_ROWS - key) / 8) : KEYS / 8;
            const unsigned bits = kept<false>(a.dropout, a.shape.seq_len, a.shape.row(blockIdx.y, first) * a.shape.seq_len + key, count);
            for_scores(s, [&](int j, int i) { s[j][i] *= bits >> (4 * j + i) & 1 ? a.dropout.keep_scale : 0.0f; });
        }
        tiles.template fold<KEYS>(s, values, hidden, out);
    }
};

// Waits for the block's copies.
__device__ inline void meet_copies() {
    wait_for_copies<0>();
    if constexpr (WGMMA) show_to_products();
    __syncthreads();
}

template <class T, int SIZE> __device__ void attend(const AttentionForward& a) {
    using Q = Queries<T, SIZE>;
    constexpr int ROW = Tiles<T, SIZE>::ROW, KEYS = Q::KEYS;
    const Tiles<T, SIZE> tiles(a.shape);
    const unsigned head = blockIdx.y, key_head = head / a.shape.group;
    SHARED(T, memory);
    // Two stages of keys and values. The second first holds queries that go to registers.
    const auto stage = [&](unsigned turn) { return memory + turn * 2 * KEYS * ROW; };
    const auto fetch = [&](unsigned key, unsigned turn) {
        tiles.template fetch<KEYS>(a.k, key_head, key, stage(turn));
        tiles.template fetch<KEYS>(a.v, key_head, key, stage(turn) + KEYS * ROW);
        commit_copies();
    };
    const unsigned warp = threadIdx.x / WARP, seq_len = a.shape.seq_len;
    // Start with the tiles that have the most keys.
    const unsigned block_first = (gridDim.x - 1 - blockIdx.x) * ROWS, first = block_first + warp * WARP_ROWS;
    Q queries{a, tiles, first, {}};
    const unsigned begin = a.shape.first_key(block_first) / KEYS * KEYS, end = min(block_first + ROWS, seq_len);
    T* const at_rest = stage(Q::HELD ? 1 : 2);
    tiles.template fetch<ROWS>(a.q, head, block_first, at_rest);
    fetch(begin, 0);
    meet_copies();
    queries.left.take(tiles, at_rest);
    if constexpr (Q::HELD) __syncthreads();
    const unsigned span = WGMMA ? block_first : first;
    unsigned turn = 0;
    for (unsigned key = begin; key < end; key += KEYS, turn ^= 1) {
        if (key > begin) meet_copies();
        if (key + KEYS < end) fetch(key + KEYS, turn ^ 1);
        if (span >= seq_len || key >= span + SPAN || key + KEYS <= a.shape.first_key(span)) continue;
        const T *keys = stage(turn), *values = keys + KEYS * ROW;
        if (Q::HELD && key + KEYS - 1 <= span && key >= a.shape.first_key(span + SPAN - 1)) {
            queries.template meet<false>(key, keys, values);
        } else {
            queries.template meet<true>(key, keys, values);
        }
    }
    __syncthreads();
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float total = row_sum(queries.total[half]);
        const unsigned row = first + tiles.lane / 4 + 8 * half;
        factors[half] = 1.0f / total;
        if (tiles.lane % 4 == 0 && row < seq_len) {
            store(a.lse, a.shape.row(head, row), queries.top[half] * factor_of_scores(a.shape) + logf(total));
        }
    }
    tiles.store_rows(memory + warp * WARP_ROWS * ROW, a.out, head, first, 0, queries.out, factors);
}

// A warp's resident rows of the backward pass, keys or queries, with the running sums of their gradients. Operands come
// in pairs, in this order: keys and values, or queries and the output's gradient.
template <class T, int SIZE, bool KEYS_AT_REST> struct Gradient {
    // Larger heads lack registers: the resident rows stay in shared memory, and one load of them serves more columns.
    static constexpr bool HELD = SIZE <= 64;
    static constexpr int TILE = HELD || WGMMA ? 64 : SIZE <= 128 ? 32 : 16;  // rows of an iterated tile
    // Columns of scores at a time. The largest heads, and the largest whose rows are in registers, leave room for only
    // 16.
    static constexpr int GROUP = !WGMMA && (SIZE == 64 || SIZE > 128) ? 16 : 32;
    // From one pair of statistics to the next.
    static constexpr int STATS = WGMMA ? 2 : Tiles<T, SIZE>::ROW * sizeof(T) / sizeof(float);
    // Columns of a block's results: two gradients of the largest heads do not fit.
    static constexpr int WIDTH = KEYS_AT_REST && SIZE > 128 ? 128 : SIZE;

    const AttentionBackward& a;
    const Tiles<T, SIZE>& tiles;
    const unsigned first, span;  // resident row, and the first with the same work
    Left<T, SIZE, HELD> left[2];
    float lse[2], delta[2];  // of the resident rows, if they are queries
    float out[KEYS_AT_REST ? 2 : 1][WIDTH / 8][4] = {};

    // Whether the GROUP columns starting at `column` are masked for every resident row (`hidden`) or for none (`seen`).
    __device__ bool hidden(unsigned column) const {
        const unsigned last = span + SPAN - 1;
        return KEYS_AT_REST ? column + GROUP <= span || column >= a.shape.seq_len || a.shape.first_key(column) > last
                            : column > last || column + GROUP <= a.shape.first_key(span);
    }
    __device__ bool seen(unsigned column) const {
        const unsigned last = span + SPAN - 1, last_column = column + GROUP - 1;
        return KEYS_AT_REST ? column >= last && last_column < a.shape.seq_len && a.shape.first_key(last_column) <= span
                            : last_column <= span && a.shape.first_key(last) <= column;
    }

    // The products of the resident rows of the output and its gradient, which `tile` has, for this lane's rows.
    __device__ void find_deltas(unsigned head, const T* tile) {
        constexpr int N = Tiles<T, SIZE>::CHUNK;
        const unsigned lane = tiles.lane, row = first + lane / 2;
        float sum = 0.0f;
#pragma unroll 1
        for (unsigned c = lane % 2 * N; c < a.shape.head_size && row < a.shape.seq_len; c += 2 * N) {
            float out[N];
            load_pack<T>(a.out.first, a.shape.at(a.out, head, row) + c, a.shape.whole, a.shape.head_size - c, out);
            const T* dout = tile + Tiles<T, SIZE>::template place<ROWS>(row % ROWS, c);
#pragma unroll
            for (int i = 0; i < N; ++i) sum += out[i] * to_float(dout[i]);
        }
        sum += __shfl_xor_sync(EVERY_LANE, sum, 1);
        if (lane % 2 == 0 && row < a.shape.seq_len) store(a.delta, a.shape.row(head, row), sum);
#pragma unroll
        for (int half = 0; half < 2; ++half) delta[half] = __shfl_sync(EVERY_LANE, sum, (lane / 4 + 8 * half) * 2);
    }

    // Adds the gradients, starting at column `begin` of the head, from the GROUP columns of scores starting at
    // `column`, for a head of queries. `tile` and `other` hold their operands' rows, `stats` the log-sum-exps and
    // deltas of queries.
    template <bool MASKED>
    __device__ void meet(unsigned head, unsigned column, unsigned begin, const T* tile, const T* other, const float* stats) {
        const unsigned lane = tiles.lane, seq_len = a.shape.seq_len;
        const auto none = [](unsigned) { return false; };
        const float scale = factor_of_scores(a.shape) * LOG2_E;
        float p[GROUP / 8][4], ds[GROUP / 8][4];
        if constexpr (WGMMA) {
            left[0].template start_scores<TILE, GROUP>(tile, p);
            left[1].template start_scores<TILE, GROUP>(other, ds);
            wait_for_products<0>(p);
            wait_for_products<0>(ds);
        } else {
            left[0].template scores<GROUP>(tiles, tile, none, p);
            left[1].template scores<GROUP>(tiles, other, none, ds);
        }
        cap(a.shape, p);
        unsigned bits = 0;
        if (a.dropout.threshold != 0) {
            const size_t query = a.shape.row(head, KEYS_AT_REST ? column : first);
            bits = kept<KEYS_AT_REST>(a.dropout, seq_len, query * seq_len + (KEYS_AT_REST ? first : column), GROUP / 8);
        }
        const auto mask = [&](int j, int i) { return bits >> (4 * j + i) & 1 ? a.dropout.keep_scale : 0.0f; };
        // Separate loops, so that dropout and soft caps take no instructions in calls without them.
        if (a.dropout.threshold != 0) for_scores(ds, [&](int j, int i) { ds[j][i] *= mask(j, i); });
        for_scores(ds, [&](int j, int i) { ds[j][i] -= KEYS_AT_REST ? stats[column_of(j, i) * STATS + 1] : delta[i / 2]; });
        if (a.shape.softcap != 0.0f) for_scores(ds, [&](int j, int i) { ds[j][i] *= 1.0f - p[j][i] * p[j][i]; });
        for_scores(p, [&](int j, int i) {
            const unsigned within = column_of(j, i), row = first + lane / 4 + i / 2 * 8;
            const unsigned query = KEYS_AT_REST ? column + within : row, key = KEYS_AT_REST ? row : column + within;
            const float log = KEYS_AT_REST ? stats[within * STATS] : lse[i / 2];
            p[j][i] = fast_exp2(p[j][i] * scale - log * LOG2_E);
            if (MASKED && (key > query || query >= seq_len || key < a.shape.first_key(query))) p[j][i] = 0.0f;
            ds[j][i] *= p[j][i];
        });
        if (KEYS_AT_REST && a.dropout.threshold != 0) for_scores(p, [&](int j, int i) { p[j][i] *= mask(j, i); });
        if constexpr (KEYS_AT_REST) tiles.template fold<TILE>(p, other + begin, none, out[1]);
        tiles.template fold<TILE>(ds, tile + begin, none, out[0]);
    }
};

// Starts copying N queries and rows of the output's gradient, or N keys and values, into two consecutive tiles.
template <int N, class T, int SIZE>
__device__ inline void fetch_two(const Tiles<T, SIZE>& tiles, const AttentionBackward& a, bool queries, unsigned head, unsigned first, T* tile) {
    tiles.template fetch<N>(queries ? a.q : a.k, head, first, tile);
    tiles.template fetch<N>(queries ? a.dout : a.v, head, first, tile + N * Tiles<T, SIZE>::ROW);
}

template <class T, int SIZE, bool KEYS_AT_REST> __device__ void differentiate(const AttentionBackward& a) {
    using G = Gradient<T, SIZE, KEYS_AT_REST>;
    constexpr int LD = Tiles<T, SIZE>::LD, ROW = Tiles<T, SIZE>::ROW, TILE = G::TILE;
    const Tiles<T, SIZE> tiles(a.shape);
    const unsigned warp = threadIdx.x / WARP, seq_len = a.shape.seq_len, group = a.shape.group;
    // The resident rows' head, and the heads that they combine with: those of the queries of a head of keys, or one of
    // keys.
    const unsigned rest_head = blockIdx.y, first_head = KEYS_AT_REST ? rest_head * group : rest_head / group;
    const unsigned end_of_heads = first_head + (KEYS_AT_REST ? group : 1);
    SHARED(T, memory);
    // Two stages of two tiles. Resident rows have separate memory, or, if they go to registers, the second stage's at
    // first.
    const auto stage = [&](unsigned turn) { return memory + turn * 2 * TILE * ROW; };
    T* const at_rest = stage(G::HELD ? 1 : 2);
    // The log-sum-exps and deltas of queries, in pairs: at the ends of the rows of queries, or, if these have no space,
    // at the end.
    float* const end_of_rows = reinterpret_cast<float*>(stage(2) + (G::HELD ? 0 : 2 * ROWS * ROW));
    const auto stats = [&](unsigned turn) {
        return WGMMA ? end_of_rows + turn * 2 * TILE : reinterpret_cast<float*>(stage(turn) + SIZE);
    };
    const auto fetch = [&](unsigned head, unsigned column, unsigned turn) {
        fetch_two<TILE>(tiles, a, KEYS_AT_REST, head, column, stage(turn));
        if constexpr (KEYS_AT_REST) {
            for (unsigned i = threadIdx.x; i < 2 * TILE; i += THREADS) {
                const bool inside = column + i / 2 < seq_len;
                const float* source = (i % 2 == 0 ? a.lse : a.delta) + (inside ? a.shape.row(head, column + i / 2) : 0);
                copy_async<4>(stats(turn) + i / 2 * G::STATS + i % 2, source, inside);
            }
        }
        commit_copies();
    };
    // Start with the tiles that have the most work.
    constexpr unsigned PARTS = SIZE / G::WIDTH;
    const unsigned block_first = (KEYS_AT_REST ? blockIdx.x / PARTS : gridDim.x - 1 - blockIdx.x) * ROWS;
    const unsigned begin_of_part = blockIdx.x % PARTS * G::WIDTH;
    const unsigned begin = KEYS_AT_REST ? block_first : a.shape.first_key(block_first) / TILE * TILE;
    const unsigned end = KEYS_AT_REST ? a.shape.end_of_queries(block_first + ROWS - 1) : min(block_first + ROWS, seq_len);
    const unsigned first = block_first + warp * WARP_ROWS, span = WGMMA ? block_first : first;
    G gradient{a, tiles, first, span};
    fetch_two<ROWS>(tiles, a, !KEYS_AT_REST, rest_head, block_first, at_rest);
    fetch(first_head, begin, 0);
    if constexpr (!KEYS_AT_REST) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned row = first + tiles.lane / 4 + 8 * half;
            gradient.lse[half] = row < seq_len ? load(a.lse, a.shape.row(rest_head, row)) : 0.0f;
        }
    }
    meet_copies();
#pragma unroll
    for (int i = 0; i < 2; ++i) gradient.left[i].take(tiles, at_rest + i * ROWS * ROW);
    if constexpr (!KEYS_AT_REST) gradient.find_deltas(rest_head, at_rest + ROWS * ROW);
    if constexpr (G::HELD) __syncthreads();
    for (unsigned head = first_head, column = begin, turn = 0, next = begin; head < end_of_heads; column = next, turn ^= 1) {
        if (head > first_head || column > begin) meet_copies();
        const unsigned now = head;
        next = column + TILE;
        if (next >= end) next = begin, ++head;
        if (head < end_of_heads) fetch(head, next, turn ^ 1);
        if (span >= seq_len) continue;
#pragma unroll 1
        for (unsigned within = 0; within < TILE; within += G::GROUP) {
            if (gradient.hidden(column + within)) continue;
            const T* tile = stage(turn) + within * LD;
            // The largest heads always apply masks, because a driver compiles each copy of this code.
            const float* of_tile = stats(turn) + within * G::STATS;
            if (SIZE <= 128 && gradient.seen(column + within)) {
                gradient.template meet<false>(KEYS_AT_REST ? now : rest_head, column + within, begin_of_part, tile, tile + TILE * ROW, of_tile);
            } else {
                gradient.template meet<true>(KEYS_AT_REST ? now : rest_head, column + within, begin_of_part, tile, tile + TILE * ROW, of_tile);
            }
        }
    }
    __syncthreads();
    const float scales[2] = {a.shape.softmax_scale, a.shape.softmax_scale}, ones[2] = {1.0f, 1.0f};
    T* const place = memory + warp * WARP_ROWS * ROW;
    tiles.store_rows(place, KEYS_AT_REST ? a.dk : a.dq, rest_head, first, begin_of_part, gradient.out[0], scales);
    if constexpr (KEYS_AT_REST) tiles.store_rows(place, a.dv, rest_head, first, begin_of_part, gradient.out[1], ones);
}

}  // namespace

// One entry for each type and each of these head sizes; other heads run in the next larger one.
#ifdef WARPGROUPS
// Blocks that hide each other's latencies; more would spill.
#define ENTRY_OF_SIZE(symbol, size, ...) ENTRY_OF_BLOCKS(symbol, THREADS, size == 64 ? 3 : 2, __VA_ARGS__)
#else
#define ENTRY_OF_SIZE(symbol, size, ...) ENTRY(symbol, THREADS, __VA_ARGS__)
#endif
#define ENTRIES_TYPE(type, size)                                                                                          \
    ENTRY_OF_SIZE(SYMBOL(attention_forward, type, size), size, AttentionForward, attend<type, size>)                      \
    ENTRY_OF_SIZE(SYMBOL(attention_backward_kv, type, size), size, AttentionBackward, differentiate<type, size, true>)    \
    ENTRY_OF_SIZE(SYMBOL(attention_backward_q, type, size), size, AttentionBackward, differentiate<type, size, false>)
#define ENTRIES_SIZE(size)  \
    ENTRIES_TYPE(f16, size) \
    ENTRIES_TYPE(bf16, size)
ENTRIES_SIZE(64)
ENTRIES_SIZE(128)
#ifndef WARPGROUPS
ENTRIES_SIZE(32)
ENTRIES_SIZE(96)
ENTRIES_SIZE(256)
#endif
