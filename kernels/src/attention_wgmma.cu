// Causal self-attention on the tensor cores of compute capability 9.0, by products of four warps: attention_mma.cu for
// heads of up to 128 elements.
#define WARPGROUPS
#include "attention_mma.cu"
