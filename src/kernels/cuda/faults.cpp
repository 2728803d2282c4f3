// Kernels with the faults that the emulator must find, for its own tests; no other compiler sees them.
#include "random.cuh"

struct Faulty {
    const float* in;
    float* out;
    unsigned len, fault;
};

enum Fault : unsigned { NONE, READ_BEHIND, WRITE_INPUT, SHARED_BEHIND, BARRIER_IN_BRANCH, LEFT_BEFORE_BARRIER, NO_BARRIER, PART_OF_A_WARP };

constexpr unsigned THREADS = 64;

// out = in in reverse, by way of shared memory: in one block, for as many elements as threads.
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
        if (i % 2 == 0) warp_sum(1.0f);
        __syncthreads();
    } else if (a.fault != NO_BARRIER) {
        __syncthreads();
    }
    store(a.out, i, places[THREADS - 1 - i]);
}

ENTRY(faulty, THREADS, Faulty, reverse)
