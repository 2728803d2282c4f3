// Stand-ins for cuBLAS and cuRAND, as far as candle calls them, and for cuBLASLt, as far as our kernels do: products as
// plain loops with sums in FP32; no random numbers.
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

// Queues C = alpha · A · B + bias, or adds that to C, for each matrix of a batch. A bias has an element for each row.
Status multiply(void* stream, Operand left, Operand right, Operand out, int m, int n, int k, int batch, float alpha, bool adds, Address bias) {
    return enqueue(stream, [=] {
        for (int matrix = 0; matrix < batch; ++matrix) {
            const auto rows = left.widened(m, k, matrix, true), columns = right.widened(k, n, matrix, false);
            char* to = reinterpret_cast<char*>(out.address) + matrix * out.batch_stride * size_of(out.type);
            for (int column = 0; column < n; ++column) {
                for (int row = 0; row < m; ++row) {
                    const size_t place = row + size_t(column) * out.stride;
                    float sum = alpha * dot(&rows[size_t(row) * k], &columns[size_t(column) * k], k);
                    if (adds) sum = at(to, out.type, place) + sum;
                    if (bias != 0) sum += at(reinterpret_cast<const void*>(bias), out.type, row);
                    put(to, out.type, place, sum);
                }
            }
        }
        return OK;
    });
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
    return multiply(handle->stream, left, right, out, m, n, k, batch, *alpha, *beta == 1.0f, 0);
}

// cuBLASLt's descriptions: what their attributes were set to.
struct Product {
    int operations[2] = {}, epilogue = 1;
    Address bias = 0;
};
struct Matrix {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reduction = 7, alignments[4] = {256, 256, 256, 256};
};
struct Algorithm {
    uint64_t data[8];
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    Status status;
    float waves;
    int unused[4];
};
constexpr int BIAS = 4;

EXPORT Status cublasLtCreate(int** out) {
    static int library;
    *out = &library;
    return ready() ? OK : REFUSED;
}
EXPORT Status cublasLtDestroy(int*) { return OK; }
EXPORT Status cublasLtMatmulDescCreate(Product** out, int compute, int scale) {
    *out = new Product;
    return compute == COMPUTE_32F && scale == F32 ? OK : REFUSED;
}
EXPORT Status cublasLtMatmulDescDestroy(Product* it) {
    delete it;
    return OK;
}
EXPORT Status cublasLtMatmulDescSetAttribute(Product* it, int attribute, const void* value, size_t bytes) {
    void* const places[] = {&it->operations[0], &it->operations[1], nullptr, nullptr, &it->epilogue, &it->bias};
    void* const place = attribute >= 3 && attribute <= 8 ? places[attribute - 3] : nullptr;
    if (place == nullptr || bytes != (attribute == 8 ? 8 : 4)) return complain("an attribute of a product: %d", attribute);
    std::memcpy(place, value, bytes);
    return OK;
}
EXPORT Status cublasLtMatrixLayoutCreate(Matrix** out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = new Matrix{type, rows, columns, stride};
    return OK;
}
EXPORT Status cublasLtMatrixLayoutDestroy(Matrix* it) {
    delete it;
    return OK;
}
EXPORT Status cublasLtMatmulPreferenceCreate(Preference** out) {
    *out = new Preference;
    return OK;
}
EXPORT Status cublasLtMatmulPreferenceDestroy(Preference* it) {
    delete it;
    return OK;
}
EXPORT Status cublasLtMatmulPreferenceSetAttribute(Preference* it, int attribute, const void* value, size_t bytes) {
    if (attribute == 1) std::memcpy(&it->workspace, value, bytes);
    if (attribute == 3) std::memcpy(&it->reduction, value, bytes);
    if (attribute >= 5 && attribute <= 8) std::memcpy(&it->alignments[attribute - 5], value, bytes);
    return OK;
}
// The stand-in's one algorithm contains the problem it was chosen for.
EXPORT Status cublasLtMatmulAlgoGetHeuristic(int*, const Product* product, const Matrix* a, const Matrix*, const Matrix* c, const Matrix*,
                                             const Preference* preference, int, Heuristic* out, int* found) {
    // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
    if (preference->reduction != 2) return complain("sums of a product may be rounded to 16 bits in between");
    *out = {};
    const uint32_t* const alignments = preference->alignments;
    out->algorithm = {{c->rows, c->columns, static_cast<uint64_t>(a->stride), preference->workspace, alignments[0], alignments[1],
                       alignments[2], static_cast<uint64_t>(product->epilogue)}};
    *found = 1;
    return OK;
}

EXPORT Status cublasLtMatmul(int*, const Product* product, const float* alpha, const void* a, const Matrix* of_a, const void* b,
                             const Matrix* of_b, const float* beta, const void* c, const Matrix* of_c, void* d, const Matrix* of_d,
                             const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
    const auto operand = [](const void* first, const Matrix* of, int operation) {
        return Operand{reinterpret_cast<Address>(first), of->type, static_cast<int>(of->stride), 0, operation == 1};
    };
    const Operand left = operand(a, of_a, product->operations[0]), right = operand(b, of_b, product->operations[1]), out = operand(d, of_d, 0);
    const int m = of_d->rows, n = of_d->columns, k = left.transposed ? of_a->rows : of_a->columns;
    const bool known = product->epilogue == 1 || product->epilogue == BIAS;
    if (!ready() || stream == nullptr || c != d || !known || left.type != right.type || !(out.type == left.type || out.type == F32) ||
        !(*beta == 0.0f || *beta == 1.0f) || m < 1 || n < 1 || k < 1 ||
        k != static_cast<int>(right.transposed ? of_b->columns : of_b->rows)) {
        return complain("a product that the stand-in does not know");
    }
    const uint64_t* const data = algorithm->data;
    const bool aligned = left.address % data[4] == 0 && right.address % data[5] == 0 && out.address % data[6] == 0;
    if (data[0] != of_d->rows || data[1] != of_d->columns || data[2] != static_cast<uint64_t>(of_a->stride) || !aligned ||
        data[7] != static_cast<uint64_t>(product->epilogue) || data[3] > bytes) {
        return complain("a product by an algorithm for another");
    }
    const Address bias = product->epilogue == BIAS ? product->bias : 0;
    if (!left.lies(m, k, 1) || !right.lies(k, n, 1) || !out.lies(m, n, 1) || !is_memory(reinterpret_cast<Address>(workspace), bytes) ||
        (bias != 0 && !is_memory(bias, m * size_of(out.type))) || (product->epilogue == BIAS && bias == 0)) {
        return complain("a product of memory that is not there");
    }
    return multiply(stream, left, right, out, m, n, k, 1, *alpha, *beta == 1.0f, bias);
}

EXPORT Status curandCreateGenerator(int** out, int) {
    static int generator;
    *out = &generator;
    return OK;
}
EXPORT Status curandSetPseudoRandomGeneratorSeed(int*, unsigned long long) { return OK; }
EXPORT Status curandSetStream(int*, void*) { return OK; }
EXPORT Status curandDestroyGenerator(int*) { return OK; }
