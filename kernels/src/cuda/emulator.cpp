// The scheduler of the emulator: see emulator.h.
#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

namespace {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 160 << 10;
// Stacks start this far from each other within their pages: the caches keep few lines at equal places of pages.
constexpr size_t STACK_STRIDE = 17 * 64, STACK_PLACES = 32 << 10;
// Shared memory is filled with this before each block, NaN in every type, and so are the bytes after it.
constexpr unsigned char POISON = 0xff;
constexpr size_t GUARD_BYTES = 4096;

enum class State { Ready, AtBarrier, InExchange, Done };

// A copy that was started. It is performed when it is waited for, so that code that does not wait fails.
struct Copy {
    unsigned char* target;
    const void* source;
    size_t bytes;
    bool inside;
};

// A place that `__builtin_setjmp` stores, with fewer registers than `setjmp`.
using Target = void* [5];

struct Fiber {
    ucontext_t context;
    Target resume;
    bool started = false;
    // Whether its thread has not run yet in this block, so that another fiber can run it.
    bool fresh = false;
    State state = State::Done;
    int line = 0;
    Exchange kind = Exchange::Sync;
    unsigned argument = 0;
    uint64_t value = 0;
    std::vector<Copy> begun;
    std::deque<std::vector<Copy>> groups;
};

struct Range {
    uintptr_t first, end;
    bool writable;
};

const Entry* entries = nullptr;
std::mutex running;
std::vector<std::unique_ptr<Fiber>> fibers;
// Each thread's index in its block.
std::vector<Index> places;
// The block's shared memory is at `shared_first`, a multiple of this, which some instructions need.
constexpr size_t SHARED_ALIGNMENT = 1024;
std::vector<unsigned char> shared_memory;
unsigned char* shared_first = nullptr;
size_t shared_bytes = 0;
std::vector<Range> ranges;
const Entry* kernel = nullptr;
const void* kernel_arguments = nullptr;
// The fiber whose turn it is, and its thread.
Fiber* current = nullptr;
unsigned current_thread = 0;
// The thread that ended last.
unsigned idle = 0;
Target scheduler;
ucontext_t scheduler_context;
std::string failure;

// The threads that take turns, `left` of them after the current one. The order is 0: upwards, 1: downwards, others: a
// stride that is coprime to the number of threads.
struct Turns {
    unsigned first, count, order, left;
} turns;

// Makes the next thread that is ready the current one; without one, and after a failure, `current` is null.
void next_turn() {
    while (turns.left > 0 && failure.empty()) {
        const unsigned i = turns.count - turns.left--;
        const unsigned thread = turns.first + (turns.order == 0 ? i : turns.order == 1 ? turns.left : (i * 13 + 5) % turns.count);
        if (fibers[thread]->state != State::Ready) continue;
        // A fiber whose thread is done runs the next one: its stack is in the cache.
        if (fibers[thread]->fresh && fibers[idle]->state == State::Done) {
            std::swap(fibers[thread], fibers[idle]);
            std::swap(fibers[thread]->state, fibers[idle]->state);
        }
        current = fibers[thread].get();
        current->fresh = false;
        current_thread = thread;
        threadIdx = places[thread];
        return;
    }
    current = nullptr;
}

// Not inline, because the target must be in another function.
[[gnu::noinline, noreturn]] void jump(Target& target) { __builtin_longjmp(target, 1); }

// Gives the turn to the next thread, and returns at this thread's next one. The jump is direct, without the scheduler,
// if the fiber has started: threads of a warp mostly wait at the same line, so the processor predicts where their
// functions return to.
[[gnu::noinline]] void leave() {
    if (current->state == State::Done) idle = current_thread;
    if (__builtin_setjmp(current->resume) != 0) return;
    next_turn();
    jump(current != nullptr && current->started ? current->resume : scheduler);
}

// Records a message, which ends the launch at the scheduler's next turn.
void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (failure.empty()) failure = text;
}

// Like `fail`, for an error of the current fiber, and ends the fiber.
template <class... Arguments> void stop(const char* format, Arguments... arguments) {
    fail(format, arguments...);
    current->state = State::Done;
    leave();
}

// A fiber's whole life: one kernel after the other.
void live() {
    for (;;) {
        kernel->function(kernel_arguments);
        if (!current->begun.empty() || !current->groups.empty()) {
            fail("%s: thread %u ends with copies that it did not wait for", kernel->name, threadIdx.x);
        }
        current->state = State::Done;
        leave();
    }
}

// Runs fibers until it is no thread's turn.
[[gnu::noinline]] void take_turns() {
    // A fiber comes back here if the next one has to be started first.
    __builtin_setjmp(scheduler);
    if (current == nullptr) return;
    if (current->started) jump(current->resume);
    current->started = true;
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&current->context);
    current->context.uc_stack = {stack, 0, STACK_BYTES - current_thread * STACK_STRIDE % STACK_PLACES};
    current->context.uc_link = nullptr;
    makecontext(&current->context, live, 0);
    swapcontext(&scheduler_context, &current->context);
}

// Stops on an address that is outside the block's shared memory or not aligned to `bytes`.
void check_shared(const void* pointer, size_t bytes, int line) {
    const auto address = reinterpret_cast<uintptr_t>(pointer), first = reinterpret_cast<uintptr_t>(shared_first);
    if (address % bytes != 0) stop("%s: line %d: an address of shared memory is not aligned to %zu bytes", kernel->name, line, bytes);
    if (address < first || address + bytes > first + shared_bytes) {
        stop("%s: line %d: thread %u is outside the block's %zu bytes of shared memory", kernel->name, line, threadIdx.x, shared_bytes);
    }
}

// The four matrices of 8 × 8 that a warp loads. PTX ISA, "ldmatrix", for .m8n8.x4.b16: lanes 8m to 8m + 7 give the rows
// of matrix m. A lane gets two neighbors of each matrix's (or its transpose's) row lane / 4, at column 2 · (lane mod
// 4).
void serve_matrices(unsigned first, bool transposed) {
    const MatrixRow* rows[WARP];
    for (unsigned lane = 0; lane < WARP; ++lane) rows[lane] = reinterpret_cast<const MatrixRow*>(fibers[first + lane]->value);
    for (unsigned lane = 0; lane < WARP; ++lane) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const auto element = [&](unsigned row, unsigned column) -> unsigned {
                return transposed ? rows[8 * matrix + column]->row[row] : rows[8 * matrix + row]->row[column];
            };
            const unsigned row = lane / 4, column = lane % 4 * 2;
            rows[lane]->fragments[matrix] = element(row, column) | element(row, column + 1) << 16;
        }
    }
}

// C += A · B for a warp's A [16, 16], B [16, 8] and C [16, 8]. PTX ISA, "Matrix Fragments for mma.m16n8k16 with
// floating point type": which row and column the elements a0 to a7, b0 to b3 and c0 to c3 of a lane are. Products are
// exact, and the GPU's sum over them is no more exact than this one, in double precision.
void serve_product(unsigned first, bool wide_exponents) {
    typedef double Columns __attribute__((vector_size(8 * sizeof(double))));
    double a[16][16];
    Columns b[16], c[16];
    const auto widen = [=](unsigned bits) -> double {
        const auto half = static_cast<uint16_t>(bits);
        return wide_exponents ? __bfloat162float({half}) : __half2float({half});
    };
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const auto* operands = reinterpret_cast<const Multiplicands*>(fibers[first + lane]->value);
        const unsigned group = lane / 4, member = lane % 4;
        for (unsigned i = 0; i < 8; ++i) {
            const bool upper = i < 2 || (4 <= i && i < 6);
            a[upper ? group : group + 8][member * 2 + (i & 1) + (i < 4 ? 0 : 8)] = widen(operands->a[i / 2] >> 16 * (i & 1));
        }
        for (unsigned i = 0; i < 4; ++i) b[member * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = widen(operands->b[i / 2] >> 16 * (i & 1));
    }
    const auto for_accumulators = [=](auto f) {
        for (unsigned lane = 0; lane < WARP; ++lane) {
            float* const own = reinterpret_cast<const Multiplicands*>(fibers[first + lane]->value)->accumulators;
            for (unsigned i = 0; i < 4; ++i) f(lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1), own[i]);
        }
    };
    for_accumulators([&](unsigned row, unsigned column, float& own) { c[row][column] = own; });
    for (unsigned row = 0; row < 16; ++row) {
        for (unsigned k = 0; k < 16; ++k) c[row] += a[row][k] * b[k];
    }
    for_accumulators([&](unsigned row, unsigned column, float& own) { own = static_cast<float>(c[row][column]); });
}

// Resumes a warp of `lanes` threads if all have arrived at the same exchange. False if they have not.
bool serve_warp(unsigned first, unsigned lanes) {
    uint64_t values[WARP];
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const Fiber &fiber = *fibers[first + lane], &neighbor = *fibers[first];
        if (fiber.state != State::InExchange) return false;
        const bool same_argument = fiber.kind == Exchange::Index || fiber.argument == neighbor.argument;
        if (fiber.line != neighbor.line || fiber.kind != neighbor.kind || !same_argument) {
            fail("%s: lanes of one warp meet in exchanges of lines %d and %d", kernel->name, neighbor.line, fiber.line);
            return false;
        }
        values[lane] = fiber.value;
        ballot |= fiber.value != 0 ? 1u << lane : 0;
    }
    switch (fibers[first]->kind) {
        case Exchange::Matrices: serve_matrices(first, false); break;
        case Exchange::MatricesTransposed: serve_matrices(first, true); break;
        case Exchange::MultiplyF16: serve_product(first, false); break;
        case Exchange::MultiplyBf16: serve_product(first, true); break;
        default: break;
    }
    const auto from = [&](unsigned lane) {
        if (lane >= lanes) fail("%s: line %d exchanges with a lane that the block does not have", kernel->name, fibers[first]->line);
        return values[lane];
    };
    for (unsigned lane = 0; lane < lanes && failure.empty(); ++lane) {
        Fiber& fiber = *fibers[first + lane];
        switch (fiber.kind) {
            case Exchange::Xor: fiber.value = from((lane ^ fiber.argument) % WARP); break;
            case Exchange::Down: fiber.value = from(lane + fiber.argument < WARP ? lane + fiber.argument : lane); break;
            case Exchange::Index: fiber.value = from(fiber.argument % WARP); break;
            case Exchange::Ballot: fiber.value = ballot; break;
            default: break;
        }
        fiber.state = State::Ready;
    }
    return true;
}

bool serve_barrier(unsigned threads) {
    for (unsigned thread = 0; thread < threads; ++thread) {
        if (fibers[thread]->state != State::AtBarrier) return false;
        if (fibers[thread]->line != fibers[0]->line) {
            fail("%s: barriers of lines %d and %d meet", kernel->name, fibers[0]->line, fibers[thread]->line);
            return false;
        }
    }
    for (unsigned thread = 0; thread < threads; ++thread) fibers[thread]->state = State::Ready;
    return true;
}

// Runs `count` threads, starting at `first`, to their next barrier or exchange, and serves exchanges that all meet in.
bool advance(unsigned first, unsigned count, unsigned order) {
    turns = {first, count, order, count};
    next_turn();
    bool progress = current != nullptr;
    take_turns();
    for (unsigned warp = first; warp < first + count && failure.empty(); warp += WARP) {
        progress |= serve_warp(warp, std::min(WARP, first + count - warp));
    }
    return progress;
}

void run_block(unsigned threads, unsigned order) {
    std::fill(shared_memory.begin(), shared_memory.end(), POISON);
    for (unsigned thread = 0; thread < threads; ++thread) {
        fibers[thread]->state = State::Ready;
        fibers[thread]->fresh = true;
    }
    const unsigned warps = (threads + WARP - 1) / WARP;
    while (failure.empty()) {
        bool progress = false;
        if (order < 2) {
            // Each warp as far as it gets without the others, the last one first in the order downwards.
            for (unsigned i = 0; i < warps; ++i) {
                const unsigned first = WARP * (order == 0 ? i : warps - 1 - i);
                while (failure.empty() && advance(first, std::min(WARP, threads - first), order)) progress = true;
            }
        } else {
            progress = advance(0, threads, order);
        }
        if (failure.empty()) progress |= serve_barrier(threads);
        const auto done = [](const auto& fiber) { return fiber->state == State::Done; };
        if (std::all_of(fibers.begin(), fibers.begin() + threads, done)) break;
        if (!progress && failure.empty()) {
            const auto waits = std::find_if_not(fibers.begin(), fibers.begin() + threads, done);
            fail("%s: thread %td of block (%u, %u, %u) waits at line %d for threads that never come", kernel->name,
                 waits - fibers.begin(), blockIdx.x, blockIdx.y, blockIdx.z, (*waits)->line);
        }
    }
    const unsigned char *const guard = shared_first + shared_bytes, *const end = shared_memory.data() + shared_memory.size();
    if (failure.empty() && std::any_of(guard, end, [](unsigned char byte) { return byte != POISON; })) {
        fail("%s: wrote behind its %zu bytes of shared memory", kernel->name, shared_bytes);
    }
}

}  // namespace

Entry::Entry(const char* name, Threads threads, size_t argument_bytes, void (*function)(const void*))
    : name(name), threads(threads), argument_bytes(argument_bytes), function(function), next(entries) {
    entries = this;
}

unsigned char* shared() { return shared_first; }

void refuse(const char* what, int line) {
    stop("%s: line %d: %s in thread (%u, %u, %u) of block (%u, %u, %u)", kernel->name, line, what, threadIdx.x, threadIdx.y,
         threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    __builtin_unreachable();
}

void check(const void* pointer, size_t bytes, bool write) {
    if (ranges.empty()) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto holds = [=](const Range& range) {
        return address >= range.first && address + bytes <= range.end && (range.writable || !write);
    };
    if (std::any_of(ranges.begin(), ranges.end(), holds)) return;
    stop("%s: thread %u of block (%u, %u, %u) %s %zu bytes outside every buffer that it may %s", kernel->name, threadIdx.x,
         blockIdx.x, blockIdx.y, blockIdx.z, write ? "writes" : "reads", bytes, write ? "write" : "read");
}

void block_barrier(int line) {
    current->state = State::AtBarrier;
    current->line = line;
    leave();
}

uint64_t exchange(Exchange kind, unsigned mask, uint64_t value, unsigned argument, int line) {
    if (mask != 0xffffffffu) fail("%s: line %d exchanges with a part of its warp", kernel->name, line);
    current->state = State::InExchange;
    current->kind = kind;
    current->value = value;
    current->argument = argument;
    current->line = line;
    leave();
    return current->value;
}

void load_matrices(Exchange kind, const void* row, unsigned (&fragments)[4], int line) {
    check_shared(row, sizeof(MatrixRow::row), line);
    MatrixRow operands;
    std::memcpy(operands.row, row, sizeof(operands.row));
    operands.fragments = fragments;
    exchange(kind, 0xffffffffu, reinterpret_cast<uint64_t>(&operands), 0, line);
}

void copy_async(void* target, const void* source, size_t bytes, bool inside, int line) {
    check_shared(target, bytes, line);
    if (reinterpret_cast<uintptr_t>(source) % bytes != 0) {
        stop("%s: line %d: copies from an address that is not aligned to %zu bytes", kernel->name, line, bytes);
    }
    if (inside) check(source, bytes, false);
    std::memset(target, POISON, bytes);
    current->begun.push_back({static_cast<unsigned char*>(target), source, bytes, inside});
}

void commit_copies() { current->groups.push_back(std::exchange(current->begun, {})); }

void wait_for_copies(size_t groups_left) {
    while (current->groups.size() > groups_left) {
        for (const Copy& copy : current->groups.front()) {
            if (copy.inside) {
                std::memcpy(copy.target, copy.source, copy.bytes);
            } else {
                std::memset(copy.target, 0, copy.bytes);
            }
        }
        current->groups.pop_front();
    }
}

}  // namespace emulator

// Bytes of the arguments that a kernel takes; 0 if there is none of that name.
extern "C" size_t emulator_argument_bytes(const char* name) {
    const emulator::Entry* entry = emulator::entries;
    while (entry != nullptr && std::string(entry->name) != name) entry = entry->next;
    return entry == nullptr ? 0 : entry->argument_bytes;
}

// Runs a kernel to its end. `order` turns the order of blocks and fibers round, `buffers` are the ones it may touch
// (all of memory if there is none). On failure the message is in `message`, and the result is not 0.
extern "C" int emulator_launch(const char* name, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
                               const void* arguments, size_t argument_bytes, const emulator::Range* buffers,
                               size_t buffer_count, unsigned order, char* message, size_t message_bytes) {
    using namespace emulator;
    const std::lock_guard<std::mutex> guard(running);
    failure.clear();
    kernel = entries;
    while (kernel != nullptr && std::string(kernel->name) != name) kernel = kernel->next;
    if (kernel == nullptr) {
        snprintf(message, message_bytes, "there is no kernel `%s`", name);
        return 1;
    }
    if (kernel->argument_bytes != argument_bytes) {
        fail("%s: takes %zu bytes of arguments, got %zu", name, kernel->argument_bytes, argument_bytes);
    }
    const unsigned threads = block[0] * block[1] * block[2];
    if (threads == 0 || threads > 1024) fail("%s: bad block", name);
    const auto [most, or_fewer] = kernel->threads;
    const bool fits = or_fewer ? threads <= most : threads == most;
    if (most != 0 && (!fits || block[0] != threads || threads % WARP != 0)) {
        fail("%s: takes %u threads, got %u", name, most, threads);
    }
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535) fail("%s: bad grid", name);
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    places.clear();
    for (unsigned i = 0; i < threads; ++i) places.push_back({i % block[0], i / block[0] % block[1], i / block[0] / block[1]});
    emulator::shared_bytes = shared_bytes;
    shared_memory.assign(shared_bytes + GUARD_BYTES + SHARED_ALIGNMENT, POISON);
    const auto start = reinterpret_cast<uintptr_t>(shared_memory.data());
    shared_first = shared_memory.data() + (SHARED_ALIGNMENT - start % SHARED_ALIGNMENT) % SHARED_ALIGNMENT;
    ranges.assign(buffers, buffers + buffer_count);
    kernel_arguments = arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    idle = 0;
    const size_t blocks = static_cast<size_t>(grid[0]) * grid[1] * grid[2];
    for (size_t i = 0; i < blocks && failure.empty(); ++i) {
        const size_t block = order == 0 ? i : blocks - 1 - i;
        blockIdx = {static_cast<unsigned>(block % grid[0]), static_cast<unsigned>(block / grid[0] % grid[1]),
                    static_cast<unsigned>(block / grid[0] / grid[1])};
        run_block(threads, order);
    }
    if (failure.empty()) return 0;
    // Unfinished fibers restart from the beginning.
    fibers.clear();
    snprintf(message, message_bytes, "%s", failure.c_str());
    return 1;
}
