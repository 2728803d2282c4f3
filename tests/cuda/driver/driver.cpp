// A stand-in for NVIDIA's driver, as far as candle's CUDA back end calls it: memory is the host's, kernels run in the emulator.
//
// A module is the PTX that nvcc made of a .cu file; a function is found in it by name, its parameters' sizes must be those of
// the same kernel compiled for the host, and the latter runs. Work starts only when the program waits for it, as on the
// slowest GPU: a read without a wait returns wrong numbers. Each allocation is followed by an inaccessible page, and
// freed memory is inaccessible, so that an access outside ends the program.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <regex>
#include <string>
#include <vector>

#include "candle.h"
#include "stream.h"

extern "C" size_t emulator_argument_bytes(const char* name);
extern "C" int emulator_launch(const char* name, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
                               const void* arguments, size_t argument_bytes, const void* buffers, size_t buffer_count,
                               unsigned order, char* message, size_t message_bytes);

const emulator::Signature* emulator::signatures = nullptr;

using namespace stand_in;

namespace {

constexpr size_t TOTAL = size_t(8) << 30, PAGE = 4096, ALIGNMENT = 256, SHARED_WITHOUT_ASKING = 48 << 10, SHARED_WHEN_ASKED = 99 << 10;
// Work is done without anybody waiting once this much memory is in use: frees take their turn in the stream.
constexpr size_t PATIENCE = size_t(512) << 20;

struct Allocation {
    size_t bytes;
    void* pages;
    size_t page_bytes;
    bool freed;
};

struct Module {
    std::string ptx;
};

struct Function {
    std::string name;
    std::vector<unsigned> sizes;
    unsigned shared_bytes = SHARED_WITHOUT_ASKING;
};

std::recursive_mutex lock;
std::map<Address, Allocation> memory;
size_t used = 0, most_used = 0;
std::deque<std::function<Status()>> pending;
// The first failure, which every later call reports again.
Status broken = OK;
std::string complaint;
thread_local void* current = nullptr;
int context, stream, pool;

struct Guard {
    std::lock_guard<std::recursive_mutex> guard{lock};
};

// Does the work that can be done without waiting for other processes.
Status work_some() {
    while (!pending.empty() && broken == OK) {
        const Status status = pending.front()();
        if (status == NOT_READY) return NOT_READY;
        pending.pop_front();
        broken = status;
    }
    return broken;
}

Status work_all() {
    while (work_some() == NOT_READY) usleep(100);
    return broken;
}

int gpus() {
    const char* said = std::getenv("STAND_IN_GPUS");
    return said != nullptr ? std::atoi(said) : 1;
}

// The sizes of a kernel's parameters in PTX; empty if there is no such kernel.
bool parameters_in(const std::string& ptx, const std::string& name, std::vector<unsigned>& sizes) {
    const size_t entry = ptx.find(".entry " + name + "(");
    if (entry == std::string::npos) return false;
    const std::string list = ptx.substr(entry, ptx.find(')', entry) - entry);
    static const std::regex parameter(R"(\.param\s+(?:\.align\s+\d+\s+)?\.[usfb](\d+)[^,\[\n]*(?:\[(\d+)\])?)");
    for (std::sregex_iterator it(list.begin(), list.end(), parameter), end; it != end; ++it) {
        sizes.push_back(std::stoul((*it)[1]) / 8 * ((*it)[2].matched ? std::stoul((*it)[2]) : 1));
    }
    return true;
}

void release(Address address) {
    const Allocation allocation = memory.at(address);
    munmap(allocation.pages, allocation.page_bytes);
    used -= allocation.bytes;
    memory.erase(address);
}

}  // namespace

namespace stand_in {

Status complain(const char* format, ...) {
    Guard guard;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    complaint = text;
    std::fprintf(stderr, "CUDA stand-in: %s\n", text);
    return INVALID;
}

bool ready() {
    Guard guard;
    return current == &context ? broken == OK : complain("no context is current") == OK;
}

bool of_stream(void* it) { return it == &stream ? ready() : complain("a stream that is not there") == OK; }

bool is_memory(Address first, size_t bytes) {
    Guard guard;
    auto next = memory.upper_bound(first);
    if (next == memory.begin()) return false;
    --next;
    return !next->second.freed && first + bytes <= next->first + next->second.bytes;
}

Status enqueue(std::function<Status()> work) {
    Guard guard;
    pending.push_back(std::move(work));
    return OK;
}

}  // namespace stand_in

EXPORT Status cuInit(unsigned) { return std::getenv("STAND_IN_WITHOUT_GPU") != nullptr ? 100 : OK; }
EXPORT Status cuDriverGetVersion(int* version) {
    const char* said = std::getenv("STAND_IN_DRIVER");
    *version = said != nullptr ? std::atoi(said) : 13000;
    return OK;
}
EXPORT Status cuGetErrorString(Status status, const char** text) {
    Guard guard;
    *text = status == 100 ? "no CUDA-capable device is detected" : status == OUT_OF_MEMORY ? "out of memory" : complaint.c_str();
    return OK;
}
EXPORT Status cuGetErrorName(Status, const char** text) {
    *text = "CUDA_STAND_IN";
    return OK;
}
EXPORT Status cuDeviceGetCount(int* count) {
    *count = gpus();
    return OK;
}
EXPORT Status cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < gpus() ? OK : INVALID;
}
EXPORT Status cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    std::memset(uuid, device, 16);
    return OK;
}
EXPORT Status cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, bytes, "stand-in");
    return OK;
}
EXPORT Status cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = size_t(1) << 30;
    return OK;
}
EXPORT Status cuDeviceGetAttribute(int* value, int attribute, int) {
    const char* capability = std::getenv("STAND_IN_CAPABILITY");
    const int said = capability != nullptr ? std::atoi(capability) : 80;
    // Compute capability, major and minor, and memory pools; every other attribute is 0.
    *value = attribute == 75 ? said / 10 : attribute == 76 ? said % 10 : attribute == 115 ? 1 : 0;
    return OK;
}
EXPORT Status cuDeviceGetDefaultMemPool(void** out, int) {
    *out = &pool;
    return OK;
}
EXPORT Status cuMemPoolSetAttribute(void* it, int attribute, void* value) {
    // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    return it == &pool && attribute == 4 && *static_cast<Address*>(value) == ~Address(0) ? OK : complain("a pool's setting");
}
EXPORT Status cuMemPoolGetAttribute(void* it, int attribute, void* value) {
    // CU_MEMPOOL_ATTR_USED_MEM_HIGH
    if (it != &pool || attribute != 8) return complain("a pool's figure");
    Guard guard;
    *static_cast<Address*>(value) = most_used;
    return OK;
}
EXPORT Status cuDevicePrimaryCtxRetain(void** out, int) {
    *out = &context;
    return OK;
}
EXPORT Status cuDevicePrimaryCtxRelease_v2(int) { return OK; }
EXPORT Status cuCtxGetCurrent(void** out) {
    *out = current;
    return OK;
}
EXPORT Status cuCtxSetCurrent(void* it) {
    current = it;
    return OK;
}
EXPORT Status cuCtxSynchronize() {
    Guard guard;
    return ready() ? work_all() : broken;
}
EXPORT Status cuStreamCreate(void** out, unsigned) {
    *out = &stream;
    return ready() ? OK : INVALID;
}
EXPORT Status cuStreamDestroy_v2(void*) { return OK; }
EXPORT Status cuStreamSynchronize(void* it) {
    Guard guard;
    return of_stream(it) ? work_all() : broken;
}
EXPORT Status cuStreamQuery(void* it) {
    Guard guard;
    return of_stream(it) ? work_some() : broken;
}
EXPORT Status cuStreamIsCapturing(void*, int* status) {
    *status = 0;
    return OK;
}
EXPORT Status cuMemGetInfo_v2(size_t* free, size_t* total) {
    Guard guard;
    *free = TOTAL - used;
    *total = TOTAL;
    return ready() ? OK : INVALID;
}

EXPORT Status cuMemAllocAsync(Address* out, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it)) return broken == OK ? INVALID : broken;
    if (used + bytes > PATIENCE && work_all() != OK) return broken;
    if (used + bytes > TOTAL) return OUT_OF_MEMORY;
    const size_t room = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, before = (room + PAGE - 1) / PAGE * PAGE;
    void* const pages = mmap(nullptr, before + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || (before > 0 && mprotect(pages, before, PROT_READ | PROT_WRITE) != 0)) return OUT_OF_MEMORY;
    *out = reinterpret_cast<Address>(pages) + before - room;
    // NaN in every type.
    std::memset(reinterpret_cast<void*>(*out), 0xff, room);
    memory[*out] = {bytes, pages, before + PAGE, false};
    used += bytes;
    most_used = std::max(most_used, used);
    return OK;
}
EXPORT Status cuMemFreeAsync(Address address, void* it) {
    Guard guard;
    if (broken != OK || current != &context) return broken;
    const auto found = memory.find(address);
    if (it != &stream || found == memory.end() || found->second.freed) return complain("frees what was not allocated");
    found->second.freed = true;
    return enqueue([=] {
        release(address);
        return OK;
    });
}
EXPORT Status cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(to, bytes)) return complain("clears memory that is not there");
    return enqueue([=] {
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        return OK;
    });
}
EXPORT Status cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(to, bytes)) return complain("sends to memory that is not there");
    // The driver copies memory whose pages are not locked before it returns.
    const auto* first = static_cast<const unsigned char*>(from);
    return enqueue([to, copy = std::vector<unsigned char>(first, first + bytes)] {
        std::memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
        return OK;
    });
}
EXPORT Status cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(from, bytes)) return complain("fetches memory that is not there");
    // If the target's pages are not locked, the driver finishes the copy before it returns.
    if (work_all() == OK) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return broken;
}
EXPORT Status cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(from, bytes) || !is_memory(to, bytes)) return complain("copies memory that is not there");
    return enqueue([=] {
        std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        return OK;
    });
}

EXPORT Status cuModuleLoadData(Module** out, const void* image) {
    const char* text = static_cast<const char*>(image);
    if (!ready() || std::strstr(text, ".version") == nullptr) return complain("loads what is no PTX");
    *out = new Module{text};
    return OK;
}
EXPORT Status cuModuleUnload(Module* it) {
    delete it;
    return OK;
}
EXPORT Status cuModuleGetFunction(Function** out, Module* of, const char* name) {
    Guard guard;
    static std::map<std::string, Function> functions;
    if (const auto found = functions.find(name); found != functions.end()) {
        *out = &found->second;
        return OK;
    }
    Function function{name, {}};
    if (!parameters_in(of->ptx, name, function.sizes)) {
        complain("the module has no kernel `%s`", name);
        return NOT_FOUND;
    }
    const emulator::Signature* host = emulator::signatures;
    while (host != nullptr && host->name != function.name) host = host->next;
    // Our own kernels take one struct.
    const unsigned char own = static_cast<unsigned char>(emulator_argument_bytes(name));
    if (host == nullptr && own == 0) return complain("`%s` was not compiled for the host", name);
    const unsigned char *first = host == nullptr ? &own : host->sizes, *last = first + (host == nullptr ? 1 : host->count);
    if (!std::equal(function.sizes.begin(), function.sizes.end(), first, last)) {
        return complain("`%s` has other parameters on the host", name);
    }
    *out = &(functions[name] = function);
    return OK;
}
EXPORT Status cuFuncSetAttribute(Function* function, int attribute, int value) {
    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (attribute != 8 || value > static_cast<int>(SHARED_WHEN_ASKED)) return complain("a kernel's attribute");
    function->shared_bytes = value;
    return OK;
}
EXPORT Status cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                             unsigned shared_bytes, void* it, void** parameters, void** extra) {
    Guard guard;
    if (!of_stream(it) || extra != nullptr) return broken != OK ? broken : complain("launches something odd");
    if (shared_bytes > function->shared_bytes) return complain("takes more shared memory than a kernel has without asking");
    // Arguments are copied now, whenever the kernel runs.
    std::vector<uint64_t> arguments;
    for (size_t i = 0; i < function->sizes.size(); ++i) {
        const size_t at = arguments.size();
        arguments.resize(at + (function->sizes[i] + sizeof(uint64_t) - 1) / sizeof(uint64_t));
        std::memcpy(&arguments[at], parameters[i], function->sizes[i]);
    }
    return enqueue([=, name = function->name, arguments = std::move(arguments)]() -> Status {
        static const char* const said = std::getenv("STAND_IN_ORDER");
        static const unsigned order = said != nullptr ? std::atoi(said) : 0;
        const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
        // Deliberate faults in kernels with these name prefixes: one does nothing, one never ends, one crashes.
        const auto has = [&](const char* fault) {
            const char* const kernel = std::getenv(fault);
            return kernel != nullptr && name.rfind(kernel, 0) == 0;
        };
        if (has("STAND_IN_SKIPS")) return OK;
        while (has("STAND_IN_HANGS")) sleep(1);
        if (has("STAND_IN_CRASHES")) std::abort();
        char message[600];
        if (emulator_launch(name.c_str(), grid, block, shared_bytes, arguments.data(), arguments.size() * sizeof(uint64_t),
                            nullptr, 0, order, message, sizeof(message)) == 0) {
            return OK;
        }
        complain("%s", message);
        return FAILED;
    });
}
