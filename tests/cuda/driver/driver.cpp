// A stand-in for NVIDIA's driver, as far as candle's CUDA back end calls it: memory is the host's, kernels run in the
// emulator.
//
// A module is the PTX that nvcc made of a .cu file; a function is found in it by name, its parameters' sizes must be
// those of the same kernel compiled for the host, and the latter runs. Work starts only when the program waits for it,
// as on the slowest GPU: a read without a wait returns wrong numbers. The first stream is candle's. All others work as
// late as events allow, or with STAND_IN_STREAMS=early as early, so that a missing wait changes the results of one of
// the two. Each allocation is followed by an inaccessible page, and freed memory is inaccessible, so that an access
// outside ends the program.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
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
    bool of_graph;
};

// The driver's numbers of types; copies and fills count as kernels.
enum NodeType { KERNEL = 0, MEM_ALLOC = 10, MEM_FREE = 11 };

struct Node {
    int type;
    std::function<Status()> work;
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
// The host's page-locked memory.
std::set<const void*> locked;
size_t used = 0, most_used = 0;
// The work of each stream.
typedef std::deque<std::function<Status()>> Stream;
std::deque<Stream> streams;
// The first failure, which every later call reports again.
Status broken = OK;
std::string complaint;
thread_local void* current = nullptr;
int context, pool;
// The nodes of the capture in progress, and the first call that it does not allow.
std::vector<Node>* captured = nullptr;
void* capture_stream = nullptr;
bool capture_invalid = false;

struct Guard {
    std::lock_guard<std::recursive_mutex> guard{lock};
};

// The work before its last record.
struct Event {
    std::shared_ptr<bool> done = std::make_shared<bool>(true);
};

bool set_to(const char* variable, const char* value) {
    const char* const said = std::getenv(variable);
    return said != nullptr && std::strcmp(said, value) == 0;
}

bool is_early() {
    static const bool early = set_to("STAND_IN_STREAMS", "early");
    return early;
}

// Does the next work of a stream, unless it waits for another stream or another process.
bool advance(Stream& it) {
    if (it.empty() || broken != OK) return false;
    const Status status = it.front()();
    if (status == NOT_READY) return false;
    it.pop_front();
    broken = status;
    return true;
}

// Works until `is_done`, or until everything waits for other processes.
Status work_some(const std::function<bool()>& is_done) {
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 1; is_early() && i < streams.size(); ++i) {
            while (advance(streams[i])) moved = true;
        }
        if (is_done()) break;
        moved |= !streams.empty() && advance(streams[0]);
        for (size_t i = 1; !moved && i < streams.size(); ++i) moved = advance(streams[i]);
    }
    return broken != OK ? broken : is_done() ? OK : NOT_READY;
}

Status work_all(const std::function<bool()>& is_done) {
    while (work_some(is_done) == NOT_READY) usleep(100);
    return broken;
}

Status work_all(void* stream) {
    return work_all([=] { return static_cast<Stream*>(stream)->empty(); });
}

// Whether a call that waits, reads the host's memory or needs its order in the stream is allowed: not in a capture,
// which it ends.
Status outside_capture(const char* call) {
    if (captured == nullptr) return OK;
    capture_invalid = true;
    complain("%s is not permitted when the stream is capturing", call);
    return CAPTURE_UNSUPPORTED;
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

bool of_stream(void* it) {
    Guard guard;
    for (const Stream& stream : streams) {
        if (it == &stream) return ready();
    }
    return complain("a stream that is not there") == OK;
}

bool is_memory(Address first, size_t bytes) {
    Guard guard;
    auto next = memory.upper_bound(first);
    if (next == memory.begin()) return false;
    --next;
    return !next->second.freed && first + bytes <= next->first + next->second.bytes;
}

bool is_capturing() {
    Guard guard;
    return captured != nullptr;
}

Status enqueue(void* stream, std::function<Status()> work) {
    Guard guard;
    if (captured != nullptr && stream == capture_stream) {
        if (capture_invalid) return CAPTURE_INVALIDATED;
        captured->push_back({KERNEL, std::move(work)});
        return OK;
    }
    static_cast<Stream*>(stream)->push_back(std::move(work));
    if (is_early()) work_some([] { return true; });
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
    // Each process sees only its own GPU.
    const char* said = std::getenv("STAND_IN_UUID");
    std::memset(uuid, said != nullptr ? std::atoi(said) : device, 16);
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
    if (const Status status = outside_capture("cuCtxSynchronize"); status != OK) return status;
    const auto is_done = [] { return std::all_of(streams.begin(), streams.end(), [](const Stream& it) { return it.empty(); }); };
    return ready() ? work_all(is_done) : broken;
}
EXPORT Status cuStreamCreate(void** out, unsigned) {
    Guard guard;
    *out = &streams.emplace_back();
    return ready() ? OK : INVALID;
}
EXPORT Status cuStreamDestroy_v2(void*) { return OK; }
EXPORT Status cuStreamSynchronize(void* it) {
    Guard guard;
    if (const Status status = outside_capture("cuStreamSynchronize"); status != OK) return status;
    return of_stream(it) ? work_all(it) : broken;
}
EXPORT Status cuStreamWaitEvent(void* it, Event* event, unsigned) {
    Guard guard;
    if (set_to("STAND_IN_IGNORES", "cuStreamWaitEvent")) return OK;
    if (!of_stream(it)) return broken == OK ? INVALID : broken;
    return enqueue(it, [done = event->done] { return *done ? OK : NOT_READY; });
}
EXPORT Status cuEventCreate(Event** out, unsigned) {
    *out = new Event;
    return ready() ? OK : INVALID;
}
EXPORT Status cuEventDestroy_v2(Event* it) {
    delete it;
    return OK;
}
EXPORT Status cuEventRecord(Event* it, void* stream) {
    Guard guard;
    if (!of_stream(stream)) return broken == OK ? INVALID : broken;
    it->done = std::make_shared<bool>(false);
    return enqueue(stream, [done = it->done] {
        *done = true;
        return OK;
    });
}
EXPORT Status cuEventQuery(Event* it) {
    Guard guard;
    if (const Status status = outside_capture("cuEventQuery"); status != OK) return status;
    if (set_to("STAND_IN_IGNORES", "cuEventQuery")) return OK;
    return ready() ? work_some([=] { return *it->done; }) : broken;
}
EXPORT Status cuEventSynchronize(Event* it) {
    Guard guard;
    if (const Status status = outside_capture("cuEventSynchronize"); status != OK) return status;
    return ready() ? work_all([=] { return *it->done; }) : broken;
}
EXPORT Status cuStreamIsCapturing(void*, int* status) {
    Guard guard;
    *status = captured == nullptr ? 0 : capture_invalid ? 2 : 1;
    return OK;
}
EXPORT Status cuStreamBeginCapture_v2(void* it, int mode) {
    Guard guard;
    // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    if (!of_stream(it) || captured != nullptr || mode != 1) return complain("begins a capture");
    captured = new std::vector<Node>;
    capture_stream = it;
    capture_invalid = false;
    return OK;
}
EXPORT Status cuStreamEndCapture(void* it, std::vector<Node>** graph) {
    Guard guard;
    if (!of_stream(it) || captured == nullptr) return complain("ends no capture");
    *graph = captured;
    captured = nullptr;
    if (!capture_invalid) return OK;
    delete *graph;
    *graph = nullptr;
    return CAPTURE_INVALIDATED;
}
EXPORT Status cuGraphInstantiateWithFlags(std::vector<Node>** exec, const std::vector<Node>* graph, unsigned long long flags) {
    if (flags != 0 || set_to("STAND_IN_GRAPH", "refuse")) return complain("the graph cannot be instantiated");
    *exec = new std::vector<Node>(*graph);
    return OK;
}
EXPORT Status cuGraphDestroy(std::vector<Node>* it) {
    delete it;
    return OK;
}
EXPORT Status cuGraphExecDestroy(std::vector<Node>* it) {
    delete it;
    return OK;
}
EXPORT Status cuGraphGetNodes(std::vector<Node>* graph, Node** nodes, size_t* count) {
    *count = graph->size();
    for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = &(*graph)[i];
    return OK;
}
EXPORT Status cuGraphNodeGetType(const Node* node, int* type) {
    *type = node->type;
    return OK;
}
// Deliberate faults of all graphs: they leave their last node out, never end, or crash.
EXPORT Status cuGraphLaunch(const std::vector<Node>* exec, void* it) {
    Guard guard;
    if (!of_stream(it) || captured != nullptr) return complain("launches a graph");
    if (const char* const log = std::getenv("STAND_IN_GRAPH_LOG")) {
        FILE* const file = std::fopen(log, "a");
        std::fprintf(file, "%zu\n", exec->size());
        std::fclose(file);
    }
    while (set_to("STAND_IN_GRAPH", "hang")) sleep(1);
    if (set_to("STAND_IN_GRAPH", "crash")) std::abort();
    const size_t count = exec->size() - set_to("STAND_IN_GRAPH", "wrong");
    for (size_t i = 0; i < count; ++i) enqueue(it, (*exec)[i].work);
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
    if (used + bytes > PATIENCE && work_all(it) != OK) return broken;
    if (used + bytes > TOTAL) return OUT_OF_MEMORY;
    const size_t room = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, before = (room + PAGE - 1) / PAGE * PAGE;
    void* const pages = mmap(nullptr, before + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || (before > 0 && mprotect(pages, before, PROT_READ | PROT_WRITE) != 0)) return OUT_OF_MEMORY;
    *out = reinterpret_cast<Address>(pages) + before - room;
    // NaN in every type.
    std::memset(reinterpret_cast<void*>(*out), 0xff, room);
    memory[*out] = {bytes, pages, before + PAGE, false, captured != nullptr};
    // Such memory stays, so that the graph can be repeated.
    if (captured != nullptr) captured->push_back({MEM_ALLOC, [] { return OK; }});
    used += bytes;
    most_used = std::max(most_used, used);
    return OK;
}
EXPORT Status cuMemFreeAsync(Address address, void* it) {
    Guard guard;
    if (broken != OK || current != &context) return broken;
    const auto found = memory.find(address);
    if (!of_stream(it) || found == memory.end() || found->second.freed) return complain("frees what was not allocated");
    if (captured != nullptr) {
        if (!found->second.of_graph) return outside_capture("cuMemFreeAsync of other memory");
        captured->push_back({MEM_FREE, [] { return OK; }});
        return OK;
    }
    found->second.freed = true;
    return enqueue(it, [=] {
        release(address);
        return OK;
    });
}
EXPORT Status cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    Guard guard;
    if (const Status status = outside_capture("cuMemHostAlloc"); status != OK) return status;
    *out = std::malloc(bytes);
    locked.insert(*out);
    return ready() ? OK : INVALID;
}
EXPORT Status cuMemFreeHost(void* it) {
    Guard guard;
    if (locked.erase(it) == 0) return complain("frees memory of the host that is not there");
    std::free(it);
    return OK;
}
EXPORT Status cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(to, bytes)) return complain("clears memory that is not there");
    return enqueue(it, [=] {
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        return OK;
    });
}
EXPORT Status cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* it) {
    Guard guard;
    // The driver would record the host's address, which is of no use later.
    if (const Status status = outside_capture("cuMemcpyHtoDAsync"); status != OK) return status;
    if (!of_stream(it) || !is_memory(to, bytes)) return complain("sends to memory that is not there");
    const auto* first = static_cast<const unsigned char*>(from);
    if (locked.count(from) > 0) {
        return enqueue(it, [=] {
            std::memcpy(reinterpret_cast<void*>(to), first, bytes);
            return OK;
        });
    }
    // The driver copies memory whose pages are not locked before it returns.
    return enqueue(it, [to, copy = std::vector<unsigned char>(first, first + bytes)] {
        std::memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
        return OK;
    });
}
EXPORT Status cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* it) {
    Guard guard;
    if (const Status status = outside_capture("cuMemcpyDtoHAsync"); status != OK) return status;
    if (!of_stream(it) || !is_memory(from, bytes)) return complain("fetches memory that is not there");
    // If the target's pages are not locked, the driver finishes the copy before it returns.
    if (work_all(it) == OK) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return broken;
}
EXPORT Status cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* it) {
    Guard guard;
    if (!of_stream(it) || !is_memory(from, bytes) || !is_memory(to, bytes)) return complain("copies memory that is not there");
    return enqueue(it, [=] {
        std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        return OK;
    });
}

EXPORT Status cuModuleLoadData(Module** out, const void* image) {
    const char* text = static_cast<const char*>(image);
    if (const Status status = outside_capture("cuModuleLoadData"); status != OK) return status;
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
    return enqueue(it, [=, name = function->name, arguments = std::move(arguments)]() -> Status {
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
