// Work on many tensors in one launch: a block for each chunk, whatever the tensors' sizes.
#pragma once

#include "common.cuh"

// Elements of a chunk.
constexpr unsigned CHUNK = 1 << 16;

// Chunk `index` of tensor `tensor`. The table, one entry a block, is made once by the host.
struct Chunk {
    unsigned tensor, index;
};

// Where the chunk begins and how many of `len` elements it has.
struct Span {
    size_t first;
    unsigned count;
};

__device__ inline Span span_of(const Chunk& chunk, u64 len) {
    const size_t first = static_cast<size_t>(chunk.index) * CHUNK;
    return {first, static_cast<unsigned>(len - first < CHUNK ? len - first : CHUNK)};
}
