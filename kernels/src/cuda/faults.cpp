// Kernels with the faults that the emulator must find, for its own tests; no other compiler sees them.
#include "random.cuh"
#include "tensor_core.cuh"

struct Faulty {
    const float* in;
    float* out;
    unsigned len, fault;
};

enum Fault : unsigned { NONE, READ_BEHIND, WRITE_INPUT, SHARED_BEHIND, BARRIER_IN_BRANCH, LEFT_BEFORE_BARRIER, NO_BARRIER, PART_OF_A_WARP };

constexpr unsigned THREADS = 64;

// out = in in reverse, through shared memory: in one block, for as many elements as threads.
static void reverse(const Faulty& a) {
    SHARED(float, places);
    const unsigned i = threadIdx.x;
    places[i] = load(a.in, a.fault == READ_BEHIND ? i + 1 : i);
    if (a.fault == WRITE_INPUT) store(const_cast<float*>(a.in), i, 0.0f);
    if (a.fault == SHARED_BEHIND) places[i + 1] = 0.0f;
    if (a.fault == BARRIER_IN_BRANCH) {
        if (i < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    } else if (a.fault == LEFT_BEFORE_BARRIER) {
        if (i == 3) return;
        __syncthreads();
    } else if (a.fault == PART_OF_A_WARP) {
        if (i % 2 == 0) warp_reduce(1.0f, Add());
        __syncthreads();
    } else if (a.fault != NO_BARRIER) {
        __syncthreads();
    }
    store(a.out, i, places[THREADS - 1 - i]);
}

ENTRY(faulty, THREADS, Faulty, reverse)
ENTRY(faulty_or_smaller, UP_TO(THREADS), Faulty, reverse)

enum CopyFault : unsigned {
    NO_FAULT,
    NO_WAIT,
    NO_GROUP,
    WAIT_FOR_TOO_FEW,
    NO_BARRIER_AFTER_WAIT,
    NO_BARRIER_BEFORE_REUSE,
    UNFINISHED,
    COPY_FROM_BEHIND,
    COPY_FROM_BETWEEN,
    COPY_TO_BEHIND,
    COPY_TO_BETWEEN,
};

// out[i] = the sum of the four numbers of chunk 63 - i over `len` steps of 64 chunks each, which come by asynchronous
// copies: two places take turns, or one is used again and again.
static void add_up(const Faulty& a) {
    SHARED(float, places);
    const unsigned i = threadIdx.x, stages = a.fault == NO_BARRIER_BEFORE_REUSE ? 1 : 2;
    const auto begin = [&](unsigned step) {
        const unsigned number = 4 * (step * THREADS + i + (a.fault == COPY_FROM_BEHIND ? 1 : 0));
        const float* source = a.in + number + (a.fault == COPY_FROM_BETWEEN ? 1 : 0);
        float* target = places + 4 * (step % stages * THREADS + i) + (a.fault == COPY_TO_BEHIND ? 2 * 4 * THREADS : 0);
        // Chunks of the last step that are not inside are zero.
        copy_async<16>(target + (a.fault == COPY_TO_BETWEEN ? 2 : 0), source, step + 1 < a.len || i % 2 == 1);
        if (a.fault != NO_GROUP) commit_copies();
    };
    begin(0);
    float sum = 0.0f;
    for (unsigned step = 0; step < a.len; ++step) {
        if (a.fault == WAIT_FOR_TOO_FEW) {
            wait_for_copies<1>();
        } else if (a.fault != NO_WAIT && !(a.fault == UNFINISHED && step + 1 == a.len)) {
            wait_for_copies<0>();
        }
        if (a.fault != NO_BARRIER_AFTER_WAIT) __syncthreads();
        if (stages == 2 && step + 1 < a.len) begin(step + 1);
        for (int k = 0; k < 4; ++k) sum += places[4 * (step % stages * THREADS + THREADS - 1 - i) + k];
        // The whole warp has read, but not the other one.
        __syncwarp();
        if (stages == 1 && step + 1 < a.len) begin(step + 1);
    }
    if (a.fault != UNFINISHED) {
        commit_copies();
        wait_for_copies<0>();
    }
    store(a.out, i, sum);
}

ENTRY(faulty_copies, THREADS, Faulty, add_up)

enum MatrixFault : unsigned { WHOLE, ROW_BEHIND, ROW_BETWEEN, WITHOUT_SOME_LANES, TWO_OPERATIONS, NO_WARP_BARRIER };

// out[i] = the first of the numbers that lane i gets of the first matrix, where every lane's row holds its own number.
static void exchange_rows(const Faulty& a) {
    SHARED(f16, rows);
    const unsigned lane = threadIdx.x;
    // Each writes the neighboring lane's row.
    for (int k = 0; k < 8; ++k) rows[(lane ^ 1) * 8 + k] = from_float<f16>(static_cast<float>(lane ^ 1));
    if (a.fault != NO_WARP_BARRIER) __syncwarp();
    const f16* row = rows + lane * 8 + (a.fault == ROW_BEHIND ? 8 : 0) + (a.fault == ROW_BETWEEN ? 4 : 0);
    unsigned fragments[4] = {};
    float result[4] = {};
    if (a.fault == WITHOUT_SOME_LANES) {
        if (lane % 2 == 0) multiply_add<f16>(result, fragments, 0, 0);
    } else if (a.fault == TWO_OPERATIONS && lane >= 16) {
        multiply_add<f16>(result, fragments, 0, 0);
    } else {
        load_matrices(fragments, row);
    }
    store(a.out, lane, to_float(f16{static_cast<uint16_t>(fragments[0])}));
}

ENTRY(faulty_matrices, WARP, Faulty, exchange_rows)

// One operation of a warp on each lane's words, and its results.
struct Probe {
    const unsigned* in;
    unsigned* out;
    unsigned operation, unused;
};

static void probe(const Probe& a) {
    const unsigned lane = threadIdx.x;
    if (a.operation < 2) {
        // In: the left operand's four words, the right one's two, four accumulators. Out: these.
        unsigned left[4];
        float result[4];
        for (unsigned i = 0; i < 4; ++i) left[i] = load(a.in, 10 * lane + i), result[i] = __uint_as_float(load(a.in, 10 * lane + 6 + i));
        const unsigned right0 = load(a.in, 10 * lane + 4), right1 = load(a.in, 10 * lane + 5);
        if (a.operation == 0) {
            multiply_add<f16>(result, left, right0, right1);
        } else {
            multiply_add<bf16>(result, left, right0, right1);
        }
        for (unsigned i = 0; i < 4; ++i) store(a.out, 4 * lane + i, __float_as_uint(result[i]));
    } else {
        // In: the rows of four matrices. They go to places in no order. Out: each lane's four words.
        SHARED(unsigned, places);
        unsigned* row = places + lane * 5 % 32 * 4;
        for (unsigned i = 0; i < 4; ++i) row[i] = load(a.in, 4 * lane + i);
        __syncwarp();
        unsigned fragments[4];
        if (a.operation == 2) {
            load_matrices(fragments, row);
        } else {
            load_transposed(fragments, row);
        }
        for (unsigned i = 0; i < 4; ++i) store(a.out, 4 * lane + i, fragments[i]);
    }
}

ENTRY(probe, WARP, Probe, probe)

// Without a fault: numbers from one type to another, for the emulator's conversions.
struct Converted {
    const void* in;   // X
    void* out;        // Y
    u64 len;
};

template <class X, class Y> void convert(const Converted& a) {
    for (size_t i = threadIdx.x; i < a.len; i += THREADS) store_rounded<Y>(a.out, i, load_as_float<X>(a.in, i));
}

ENTRIES_WIDE_FIRST(convert, THREADS, Converted)
ENTRY(convert_f16_f32, THREADS, Converted, convert<f16, float>)
ENTRY(convert_bf16_f32, THREADS, Converted, convert<bf16, float>)
