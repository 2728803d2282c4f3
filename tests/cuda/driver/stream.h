// Shared parts of the stand-ins for the driver, for cuBLAS and for NCCL: device memory and streams.
#pragma once

#include <cstddef>
#include <functional>

typedef int Status;
typedef unsigned long long Address;

namespace stand_in {

constexpr Status OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600, FAILED = 700,
                 CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901;

// Prints what is wrong with a call, keeps it for cuGetErrorString, and fails.
[[gnu::visibility("default")]] Status complain(const char* format, ...);
// Whether this is one of the program's streams, its context is current in this thread, and nothing has failed.
[[gnu::visibility("default")]] bool of_stream(void* it);
// Whether the context is current in this thread and nothing has failed.
[[gnu::visibility("default")]] bool ready();
// Whether a range is inside one allocation.
[[gnu::visibility("default")]] bool is_memory(Address first, size_t bytes);
// Whether a stream records its work instead of queueing it.
[[gnu::visibility("default")]] bool is_capturing();
// Queues `work` in a stream, or records it. It runs when the program waits; again and again while it is NOT_READY.
[[gnu::visibility("default")]] Status enqueue(void* stream, std::function<Status()> work);

}  // namespace stand_in

#define EXPORT extern "C" [[gnu::visibility("default")]]
// A function that no test has needed yet; weak, so that another source can define it.
#define STUB(name) \
    EXPORT [[gnu::weak]] Status name() { return stand_in::complain("the stand-in lacks " #name); }
