// Stand-ins for cuBLAS and cuRAND, as far as candle calls them: products as plain loops with sums in FP32; no random numbers.
#include <cstdint>
#include <cstring>
#include <vector>

#define EMULATOR_TYPES_WITH_OPERATORS
#include "emulator.h"
#include "stream.h"

using namespace stand_in;

namespace {

enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
constexpr int COMPUTE_32F = 68;
constexpr Status REFUSED = 7;

struct Handle {
    void* stream = nullptr;
    int math_mode = 0;
    Address workspace = 0;
};

size_t size_of(int type) { return type == F32 ? 4 : 2; }

float at(const void* base, int type, size_t i) {
    if (type == F32) return static_cast<const float*>(base)[i];
    if (type == F16) return __half2float(static_cast<const emulator::Half*>(base)[i]);
    return __bfloat162float(static_cast<const emulator::Bfloat16*>(base)[i]);
}

void put(void* base, int type, size_t i, float value) {
    if (type == F32) static_cast<float*>(base)[i] = value;
    if (type == F16) static_cast<emulator::Half*>(base)[i] = __float2half_rn(value);
    if (type == BF16) static_cast<emulator::Bfloat16*>(base)[i] = __float2bfloat16_rn(value);
}

struct Operand {
    Address address;
    int type, stride;
    long long batch_stride;
    bool transposed;

    bool lies(int rows, int columns, int batch) const {
        const int stored_rows = transposed ? columns : rows, stored_columns = transposed ? rows : columns;
        const size_t last = batch_stride * (batch - 1) + size_t(stride) * (stored_columns - 1) + stored_rows;
        return stride >= stored_rows && batch_stride >= 0 && is_memory(address, last * size_of(type));
    }
    // A matrix of the batch, row by row, or column by column.
    std::vector<float> widened(int rows, int columns, int matrix, bool by_rows) const {
        const char* base = reinterpret_cast<const char*>(address) + matrix * batch_stride * size_of(type);
        std::vector<float> values(size_t(rows) * columns);
        for (size_t row = 0; row < size_t(rows); ++row) {
            for (size_t column = 0; column < size_t(columns); ++column) {
                const size_t place = transposed ? column + row * stride : row + column * stride;
                values[by_rows ? row * columns + column : column * rows + row] = at(base, type, place);
            }
        }
        return values;
    }
};

float dot(const float* a, const float* b, size_t count) {
    float sums[16] = {};
    size_t k = 0;
    for (; k + 16 <= count; k += 16) {
        for (size_t i = 0; i < 16; ++i) sums[i] += a[k + i] * b[k + i];
    }
    float sum = 0.0f;
    for (const float part : sums) sum += part;
    for (; k < count; ++k) sum += a[k] * b[k];
    return sum;
}

}  // namespace

EXPORT Status cublasCreate_v2(Handle** out) {
    *out = new Handle;
    return ready() ? OK : REFUSED;
}
EXPORT Status cublasDestroy_v2(Handle* it) {
    delete it;
    return OK;
}
EXPORT Status cublasSetStream_v2(Handle* it, void* stream) {
    it->stream = stream;
    it->workspace = 0;
    return OK;
}
EXPORT Status cublasSetWorkspace_v2(Handle* it, void* workspace, size_t bytes) {
    it->workspace = reinterpret_cast<Address>(workspace);
    return is_memory(it->workspace, bytes) ? OK : REFUSED;
}
EXPORT Status cublasSetMathMode(Handle* it, int mode) {
    it->math_mode = mode;
    return OK;
}
EXPORT Status cublasSetPointerMode_v2(Handle*, int mode) { return mode == 0 ? OK : REFUSED; }

// C = alpha · op(A) · op(B) + beta · C for each matrix of a batch, all stored by columns.
EXPORT Status cublasGemmStridedBatchedEx(Handle* handle, int transa, int transb, int m, int n, int k, const float* alpha,
                                         const void* a, int a_type, int lda, long long stride_a, const void* b, int b_type,
                                         int ldb, long long stride_b, const float* beta, void* c, int c_type, int ldc,
                                         long long stride_c, int batch, int compute, int) {
    const Operand left{reinterpret_cast<Address>(a), a_type, lda, stride_a, transa == 1};
    const Operand right{reinterpret_cast<Address>(b), b_type, ldb, stride_b, transb == 1};
    const Operand out{reinterpret_cast<Address>(c), c_type, ldc, stride_c, false};
    const bool half = a_type == F16 || a_type == BF16;
    // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
    if (half && (handle->math_mode & 16) == 0) {
        complain("sums of a product may be rounded to 16 bits in between");
        return REFUSED;
    }
    // cuBLAS would allocate one.
    if (is_capturing() && handle->workspace == 0) {
        complain("a product in a capture without a workspace");
        return REFUSED;
    }
    if (!ready() || handle->stream == nullptr || compute != COMPUTE_32F || !(half || a_type == F32) || a_type != b_type ||
        !(c_type == a_type || c_type == F32) || !(*beta == 0.0f || *beta == 1.0f) || m < 1 || n < 1 || k < 1 || batch < 1) {
        complain("a product that the stand-in does not know");
        return REFUSED;
    }
    if (!left.lies(m, k, batch) || !right.lies(k, n, batch) || !out.lies(m, n, batch)) {
        complain("a product of memory that is not there");
        return REFUSED;
    }
    return enqueue(handle->stream, [=, alpha = *alpha, adds = *beta == 1.0f] {
        for (int matrix = 0; matrix < batch; ++matrix) {
            const auto rows = left.widened(m, k, matrix, true), columns = right.widened(k, n, matrix, false);
            char* to = reinterpret_cast<char*>(out.address) + matrix * stride_c * size_of(c_type);
            for (int column = 0; column < n; ++column) {
                for (int row = 0; row < m; ++row) {
                    const size_t place = row + size_t(column) * ldc;
                    const float product = alpha * dot(&rows[size_t(row) * k], &columns[size_t(column) * k], k);
                    put(to, c_type, place, adds ? at(to, c_type, place) + product : product);
                }
            }
        }
        return OK;
    });
}

EXPORT Status curandCreateGenerator(int** out, int) {
    static int generator;
    *out = &generator;
    return OK;
}
EXPORT Status curandSetPseudoRandomGeneratorSeed(int*, unsigned long long) { return OK; }
EXPORT Status curandSetStream(int*, void*) { return OK; }
EXPORT Status curandDestroyGenerator(int*) { return OK; }
