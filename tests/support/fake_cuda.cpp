// The parts of NVIDIA's driver and of cuBLASLt that src/engine/kernels/cuda/driver calls, on a CPU: memory is the host's, kernels run
// in the emulator, products are plain loops. Built into one library under both names, it lets the program's calls be tried
// where there is no GPU: their order, sizes, handles and descriptions. Built and used by `.ci/gpu --emulate`.
//
// Nothing is done before somebody waits for it, as on the slowest of GPUs: whoever reads too early, or overwrites what is
// still to be sent, gets other numbers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../../src/engine/kernels/cuda/emulator.h"

typedef int Status;
typedef unsigned long long Address;

struct Range {
    uintptr_t first, end;
    bool writable;
};

extern "C" size_t emulator_argument_bytes(const char* name);
extern "C" int emulator_launch(const char* name, const unsigned grid[3], unsigned threads, size_t shared_bytes,
                               const void* arguments, size_t argument_bytes, const Range* buffers, size_t buffer_count,
                               unsigned order, char* message, size_t message_bytes);

namespace {

constexpr Status OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, FAILED = 700;
constexpr size_t TOTAL = size_t(8) << 30, SHARED_WITHOUT_ASKING = 48 << 10, SHARED_MOST = 227 << 10;

struct Function {
    std::string name;
    size_t arguments, shared_bytes = SHARED_WITHOUT_ASKING;
};

typedef std::vector<std::function<Status()>> Graph;

// What a recording has so far; null while nothing is recorded.
Graph* recording = nullptr;
std::map<Address, size_t> memory;
std::map<std::string, Function> functions;
thread_local void* current = nullptr;
int context, stream, module;

// Whether a range lies in one allocation.
bool ours(Address first, size_t bytes) {
    auto next = memory.upper_bound(first);
    if (next == memory.begin()) return false;
    --next;
    return first + bytes <= next->first + next->second;
}

Status complain(const char* what) {
    std::fprintf(stderr, "fake CUDA: %s\n", what);
    return INVALID;
}

// What every call needs before it: the context, current in this thread.
bool ready() { return current == &context || complain("no context is current") == OK; }

// What a call needs besides that must not be recorded.
bool may_wait() { return ready() && (recording == nullptr || complain("a recording cannot hold this call") == OK); }

// What the stream still has to do, how much it has been given, and how much of it is done.
std::deque<std::function<Status()>> pending;
size_t given = 0, done = 0;
// The first failure, which every later call that waits reports again.
Status broken = OK;
std::map<const void*, size_t> pinned;

// An event: how much had been given to the stream when it was recorded.
struct Event {
    size_t after = 0;
};

// To be done when somebody waits for it, or when the recording is replayed.
Status enqueue(std::function<Status()> work) {
    if (recording != nullptr) {
        recording->push_back(std::move(work));
    } else {
        pending.push_back(std::move(work));
        ++given;
    }
    return OK;
}

// Does what was given first, up to the given number.
Status work_until(size_t number) {
    while (done < number && broken == OK) {
        const auto work = std::move(pending.front());
        pending.pop_front();
        ++done;
        broken = work();
    }
    return broken;
}

Status work_all() { return work_until(given); }

// Whether a range lies in pages that were locked.
bool is_pinned(const void* first, size_t bytes) {
    auto next = pinned.upper_bound(first);
    if (next == pinned.begin()) return false;
    --next;
    return static_cast<const char*>(first) + bytes <= static_cast<const char*>(next->first) + next->second;
}

}  // namespace

extern "C" {

Status cuInit(unsigned) { return OK; }
Status cuGetErrorString(Status status, const char** text) {
    *text = status == OUT_OF_MEMORY ? "out of memory" : "the fake driver refuses";
    return OK;
}
Status cuGetErrorName(Status, const char** text) {
    *text = "FAKE";
    return OK;
}
Status cuDeviceGetCount(int* count) {
    *count = 1;
    return OK;
}
Status cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? OK : INVALID;
}
Status cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, bytes, "Emulator");
    return OK;
}
Status cuDeviceGetAttribute(int* value, int attribute, int) {
    // Compute capability, major and minor; whatever else is asked for is not there.
    *value = attribute == 75 ? 9 : 0;
    return OK;
}
Status cuDevicePrimaryCtxRetain(void** out, int) {
    *out = &context;
    return OK;
}
Status cuDevicePrimaryCtxRelease_v2(int) { return OK; }
Status cuCtxGetCurrent(void** out) {
    *out = current;
    return OK;
}
Status cuCtxSetCurrent(void* it) {
    current = it;
    return OK;
}
Status cuCtxSynchronize() { return work_all(); }
Status cuStreamCreate(void** out, unsigned) {
    *out = &stream;
    return ready() ? OK : INVALID;
}
Status cuStreamDestroy_v2(void*) { return OK; }
Status cuStreamSynchronize(void* it) { return it == &stream && may_wait() ? work_all() : INVALID; }

Status cuStreamBeginCapture_v2(void* it, int) {
    if (it != &stream || !may_wait()) return INVALID;
    recording = new Graph;
    return OK;
}
Status cuStreamEndCapture(void*, Graph** out) {
    *out = recording;
    recording = nullptr;
    return *out != nullptr ? OK : INVALID;
}
Status cuGraphInstantiateWithFlags(Graph** out, Graph* graph, unsigned long long) {
    *out = new Graph(*graph);
    return OK;
}
Status cuGraphLaunch(Graph* graph, void* it) {
    if (it != &stream || !may_wait()) return INVALID;
    for (const auto& work : *graph) enqueue(work);
    return OK;
}
Status cuGraphExecDestroy(Graph* graph) {
    delete graph;
    return OK;
}
Status cuGraphDestroy(Graph* graph) {
    delete graph;
    return OK;
}

Status cuMemGetInfo_v2(size_t* free, size_t* total) {
    size_t used = 0;
    for (const auto& allocation : memory) used += allocation.second;
    *total = TOTAL;
    *free = TOTAL - used;
    return may_wait() ? OK : INVALID;
}
Status cuMemAlloc_v2(Address* out, size_t bytes) {
    size_t free, total;
    if (cuMemGetInfo_v2(&free, &total) != OK || bytes == 0) return INVALID;
    if (bytes > free) return OUT_OF_MEMORY;
    void* const allocation = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(allocation, 0xff, bytes);
    *out = reinterpret_cast<Address>(allocation);
    memory[*out] = bytes;
    return OK;
}
Status cuMemFree_v2(Address address) {
    if (work_all() != OK) return broken;
    if (memory.erase(address) != 1) return complain("frees what was not allocated");
    std::free(reinterpret_cast<void*>(address));
    return OK;
}
Status cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* it) {
    if (it != &stream || !ready() || !ours(to, bytes)) return complain("clears memory that is not there");
    return enqueue([=] {
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        return OK;
    });
}
Status cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* it) {
    if (it != &stream || !may_wait() || !ours(to, bytes)) return complain("sends to memory that is not there");
    const auto copy = [=] {
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
        return OK;
    };
    enqueue(copy);
    // Of memory whose pages are not locked the driver makes a copy before it returns.
    return is_pinned(from, bytes) ? OK : work_all();
}
Status cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* it) {
    if (it != &stream || !may_wait() || !ours(from, bytes)) return complain("fetches memory that is not there");
    enqueue([=] {
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
        return OK;
    });
    return is_pinned(to, bytes) ? OK : work_all();
}
Status cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    if (!may_wait() || bytes == 0) return INVALID;
    *out = std::malloc(bytes);
    pinned[*out] = bytes;
    return OK;
}
Status cuMemFreeHost(void* it) {
    if (pinned.erase(it) != 1) return complain("frees pages that were not locked");
    std::free(it);
    return OK;
}
Status cuEventCreate(Event** out, unsigned) {
    *out = new Event;
    return may_wait() ? OK : INVALID;
}
Status cuEventRecord(Event* event, void* it) {
    event->after = given;
    return it == &stream && may_wait() ? OK : INVALID;
}
Status cuEventSynchronize(Event* event) { return may_wait() ? work_until(event->after) : INVALID; }
Status cuEventDestroy_v2(Event* event) {
    delete event;
    return OK;
}

Status cuModuleLoadData(void** out, const void* image) {
    // A fat binary's first word.
    if (!may_wait() || *static_cast<const unsigned*>(image) != 0xba55ed50) return complain("loads what is no fat binary");
    *out = &module;
    return OK;
}
Status cuModuleUnload(void*) { return OK; }
Status cuModuleGetFunction(void** out, void* of, const char* name) {
    const size_t arguments = emulator_argument_bytes(name);
    if (of != &module || arguments == 0) return NOT_FOUND;
    *out = &(functions[name] = {name, arguments});
    return OK;
}
Status cuFuncSetAttribute(void* function, int attribute, int value) {
    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (attribute != 8 || value > static_cast<int>(SHARED_MOST)) return complain("asks for too much shared memory");
    static_cast<Function*>(function)->shared_bytes = value;
    return OK;
}
Status cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared_bytes, void* it, void** parameters, void** extra) {
    const Function kernel = *static_cast<Function*>(function);
    if (it != &stream || !ready() || ty != 1 || tz != 1 || extra != nullptr) return complain("launches something odd");
    if (shared_bytes > kernel.shared_bytes) return complain("takes more shared memory than it asked for");
    // Arguments are copied now, whenever the kernel runs.
    const auto* first = static_cast<const unsigned char*>(parameters[0]);
    std::vector<unsigned long long> arguments((kernel.arguments + 7) / 8);
    std::memcpy(arguments.data(), first, kernel.arguments);
    return enqueue([=, arguments = std::move(arguments)] {
        std::vector<Range> ranges;
        for (const auto& [first, bytes] : memory) ranges.push_back({first, first + bytes, true});
        const unsigned grid[3] = {gx, gy, gz};
        char message[600];
        if (emulator_launch(kernel.name.c_str(), grid, tx, shared_bytes, arguments.data(), kernel.arguments,
                            ranges.data(), ranges.size(), 0, message, sizeof(message)) == 0) {
            return OK;
        }
        complain(message);
        return FAILED;
    });
}

}  // extern "C"

namespace {

enum Type { F32 = 0, F16 = 2, BF16 = 14 };

struct Layout {
    Type type;
    unsigned long long rows, columns;
    long long stride;
};

enum Epilogue { PLAIN = 1, BIAS = 4, GELU_AUX_BIAS = 164, DGELU = 192, BGRADA = 256 };

struct Description {
    int transposed[2] = {0, 0};
    int epilogue = PLAIN;
    void *bias = nullptr, *aux = nullptr;
    long long aux_stride = 0;
};

struct Preference {
    size_t workspace = 0;
};

size_t size_of(Type type) { return type == F32 ? 4 : 2; }

float at(const void* base, Type type, size_t i) {
    if (type == F32) return static_cast<const float*>(base)[i];
    if (type == F16) return __half2float(static_cast<const __half*>(base)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
}

void put(void* base, Type type, size_t i, float value) {
    if (type == F32) static_cast<float*>(base)[i] = value;
    if (type == F16) static_cast<__half*>(base)[i] = __float2half_rn(value);
    if (type == BF16) static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(value);
}

// Whether a matrix lies in our memory.
bool lies(const void* base, const Layout& layout) {
    const size_t elements = layout.rows == 0 ? 0 : layout.stride * (layout.columns - 1) + layout.rows;
    return layout.stride >= static_cast<long long>(layout.rows) && reinterpret_cast<Address>(base) % 16 == 0 &&
           ours(reinterpret_cast<Address>(base), elements * size_of(layout.type));
}

// What is wrong with an epilogue, if anything.
const char* wrong_with(const Description& d, const Layout& out) {
    const bool has_aux = d.epilogue == GELU_AUX_BIAS || d.epilogue == DGELU;
    const bool has_bias = d.epilogue == BIAS || d.epilogue == GELU_AUX_BIAS || d.epilogue == BGRADA;
    if (!has_aux && !has_bias && d.epilogue != PLAIN) return "an unknown epilogue";
    if (has_bias && (d.bias == nullptr || reinterpret_cast<Address>(d.bias) % 16 != 0)) return "a bias that is not there";
    if (!has_aux) return nullptr;
    if (d.aux_stride % 8 != 0 || d.aux_stride != static_cast<long long>(out.rows)) return "an odd stride of aux";
    return d.aux == nullptr || reinterpret_cast<Address>(d.aux) % 16 != 0 ? "an aux that is not there" : nullptr;
}

bool fits(const Description& d, const Layout& a, const Layout& b, const Layout& c) {
    const auto rows = d.transposed[0] ? a.columns : a.rows, inner = d.transposed[0] ? a.rows : a.columns;
    const auto columns = d.transposed[1] ? b.rows : b.columns, inner_b = d.transposed[1] ? b.columns : b.rows;
    return a.type == b.type && inner == inner_b && rows == c.rows && columns == c.columns && (c.type == a.type || c.type == F32);
}

}  // namespace

extern "C" {

Status cublasLtCreate(void** out) {
    *out = &stream;
    return ready() ? OK : INVALID;
}
Status cublasLtDestroy(void*) { return OK; }
Status cublasLtMatmulDescCreate(Description** out, int compute, int scale) {
    *out = new Description;
    return compute == 68 && scale == F32 ? OK : complain("sums in something else than FP32");
}
Status cublasLtMatmulDescDestroy(Description* it) {
    delete it;
    return OK;
}
Status cublasLtMatmulDescSetAttribute(Description* it, int attribute, const void* value, size_t bytes) {
    const auto take = [&](void* to, size_t size) {
        std::memcpy(to, value, size);
        return bytes == size ? OK : complain("an attribute of the wrong size");
    };
    switch (attribute) {
        case 3: return take(&it->transposed[0], sizeof(int));
        case 4: return take(&it->transposed[1], sizeof(int));
        case 7: return take(&it->epilogue, sizeof(int));
        case 8: return take(&it->bias, sizeof(void*));
        case 11: return take(&it->aux, sizeof(void*));
        case 12: return take(&it->aux_stride, sizeof(long long));
        default: return complain("an unknown attribute");
    }
}
Status cublasLtMatrixLayoutCreate(Layout** out, int type, unsigned long long rows, unsigned long long columns, long long stride) {
    *out = new Layout{static_cast<Type>(type), rows, columns, stride};
    return OK;
}
Status cublasLtMatrixLayoutDestroy(Layout* it) {
    delete it;
    return OK;
}
Status cublasLtMatmulPreferenceCreate(Preference** out) {
    *out = new Preference;
    return OK;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference* it, int attribute, const void* value, size_t bytes) {
    if (attribute == 1) std::memcpy(&it->workspace, value, sizeof(size_t));
    return bytes == (attribute == 1 ? sizeof(size_t) : sizeof(unsigned)) ? OK : complain("a preference of the wrong size");
}
Status cublasLtMatmulPreferenceDestroy(Preference* it) {
    delete it;
    return OK;
}

struct Heuristic {
    unsigned long long algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

Status cublasLtMatmulAlgoGetHeuristic(void*, Description* d, Layout* a, Layout* b, Layout* c, Layout* out, Preference*,
                                      int, Heuristic* result, int* count) {
    constexpr Status UNSUPPORTED = 15;
    if (!may_wait()) return INVALID;
    *count = 0;
    // Stands for a library that lacks what is not everywhere.
    if (d->epilogue != PLAIN && d->epilogue != BIAS && std::getenv("FAKE_CUDA_REFUSES_EPILOGUES")) return UNSUPPORTED;
    if (const char* reason = wrong_with(*d, *out)) return complain(reason);
    *result = {{42}, 0, OK, 1.0f, {}};
    *count = c == out && fits(*d, *a, *b, *out);
    return OK;
}

}  // extern "C"

namespace {

// GELU in its tanh form, and its derivative, for values that neither over- nor underflow in it.
float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(0.7978846f * (x + 0.044715f * x * x * x))); }

float gelu_derivative(float x) {
    const float t = std::tanh(0.7978846f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
}

// out = epilogue(alpha · a · b + beta · out).
Status multiply(const Description& d, float alpha, const void* a, const Layout& of_a, const void* b, const Layout& of_b,
                float beta, void* out, const Layout& of_out) {
    const auto inner = d.transposed[0] ? of_a.rows : of_a.columns;
    const auto widened = [](const void* base, const Layout& layout, bool transposed) {
        // Row by row of the operand as it is read, so that the sum below runs along memory.
        const auto rows = transposed ? layout.columns : layout.rows, columns = transposed ? layout.rows : layout.columns;
        std::vector<float> values(rows * columns);
        for (size_t row = 0; row < rows; ++row) {
            for (size_t column = 0; column < columns; ++column) {
                values[row * columns + column] =
                    at(base, layout.type, transposed ? column + row * layout.stride : row + column * layout.stride);
            }
        }
        return values;
    };
    const auto left = widened(a, of_a, d.transposed[0]), right = widened(b, of_b, !d.transposed[1]);
    for (size_t column = 0; column < of_out.columns; ++column) {
        for (size_t row = 0; row < of_out.rows; ++row) {
            float sum = 0.0f;
            for (size_t k = 0; k < inner; ++k) sum += left[row * inner + k] * right[column * inner + k];
            const size_t i = row + column * of_out.stride;
            sum = alpha * sum + (beta == 0.0f ? 0.0f : beta * at(out, of_out.type, i));
            if (d.epilogue == BIAS || d.epilogue == GELU_AUX_BIAS) sum += at(d.bias, of_out.type, row);
            if (d.epilogue == GELU_AUX_BIAS) {
                put(d.aux, of_out.type, i, sum);
                sum = gelu(sum);
            }
            if (d.epilogue == DGELU) sum *= gelu_derivative(at(d.aux, of_out.type, i));
            put(out, of_out.type, i, sum);
        }
    }
    for (size_t row = 0; d.epilogue == BGRADA && row < of_out.rows; ++row) {
        float sum = 0.0f;
        for (size_t k = 0; k < inner; ++k) sum += left[row * inner + k];
        put(d.bias, of_out.type, row, sum);
    }
    return OK;
}

}  // namespace

extern "C" {

Status cublasLtMatmul(void*, Description* d, const float* alpha, const void* a, Layout* of_a, const void* b, Layout* of_b,
                      const float* beta, const void* c, Layout* of_c, void* out, Layout* of_out,
                      const unsigned long long* algorithm, void* workspace, size_t workspace_bytes, void* it) {
    if (it != &stream || !ready() || *algorithm != 42 || c != out || of_c != of_out || !fits(*d, *of_a, *of_b, *of_out) ||
        !lies(a, *of_a) || !lies(b, *of_b) || !lies(out, *of_out) ||
        !ours(reinterpret_cast<Address>(workspace), workspace_bytes)) {
        return complain("multiplies something odd");
    }
    if (const char* reason = wrong_with(*d, *of_out)) return complain(reason);
    if (d->epilogue != PLAIN && d->epilogue != DGELU &&
        !ours(reinterpret_cast<Address>(d->bias), of_out->rows * size_of(of_out->type))) {
        return complain("has a bias that is not there");
    }
    if (d->aux_stride != 0 && !lies(d->aux, *of_out)) return complain("has an aux that is not there");
    return enqueue([d = *d, alpha = *alpha, a, of_a = *of_a, b, of_b = *of_b, beta = *beta, out, of_out = *of_out] {
        return multiply(d, alpha, a, of_a, b, of_b, beta, out, of_out);
    });
}

}  // extern "C"
