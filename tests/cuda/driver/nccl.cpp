// A stand-in for NCCL, as far as `src/engine/collective/nccl.rs` calls it: processes of one machine, which are
// connected by files in a folder of shared memory. As in NCCL, a group of sends and receives is done once all others
// have taken part in theirs, and never if one has ended.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "stream.h"

using namespace stand_in;

namespace {

constexpr Status REFUSED = 5;
constexpr int BYTE = 0;

struct Communicator {
    std::string folder;
    int rank, size;
    // The numbers of messages to and from each process so far.
    std::vector<int> sent, received;
    // Whether there was a group with each process.
    std::vector<bool> connected;
    bool aborted = false;
};

struct Message {
    bool is_sent;
    int peer;
    unsigned char* bytes;
    size_t count;
    std::string file;
};

// The group that is open in this thread.
thread_local bool is_open = false;
thread_local std::vector<Message> messages;
thread_local std::shared_ptr<Communicator> of_group;
thread_local void* stream_of_group = nullptr;

std::shared_ptr<Communicator>& shared(void* communicator) { return *static_cast<std::shared_ptr<Communicator>*>(communicator); }

bool exists(const std::string& file) { return access(file.c_str(), F_OK) == 0; }

// Writes a file that others see as a whole.
bool publish(const std::string& file, const void* bytes, size_t count) {
    const std::string draft = file + ".draft";
    FILE* const out = std::fopen(draft.c_str(), "wb");
    const bool written = out != nullptr && std::fwrite(bytes, 1, count, out) == count;
    return out != nullptr && std::fclose(out) == 0 && written && std::rename(draft.c_str(), file.c_str()) == 0;
}

Status receive(const Message& message) {
    struct stat found = {};
    if (stat(message.file.c_str(), &found) != 0) return NOT_READY;
    if (size_t(found.st_size) != message.count) return complain("receives %zu bytes and expects %zu", size_t(found.st_size), message.count), FAILED;
    FILE* const in = std::fopen(message.file.c_str(), "rb");
    const bool is_read = in != nullptr && std::fread(message.bytes, 1, message.count, in) == message.count;
    if (in != nullptr) std::fclose(in);
    return is_read && unlink(message.file.c_str()) == 0 ? OK : (complain("cannot read a message"), FAILED);
}

// The file that a process writes for another one when it connects to it.
std::string connection(const Communicator& it, int from, int to) {
    return it.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-connects";
}

// Ends this process if it is the one that a test has chosen.
void leave_at(const char* variable, int rank) {
    if (const char* const leaver = std::getenv(variable); leaver != nullptr && std::atoi(leaver) == rank) std::_Exit(7);
}

Status add(bool is_sent, Address bytes, size_t count, int type, int peer, void* communicator, void* stream) {
    Communicator& it = *shared(communicator);
    if (!is_open || !of_stream(stream)) return complain("NCCL outside of a group or of a stream");
    if (type != BYTE || count == 0 || peer == it.rank || peer < 0 || peer >= it.size) return complain("an odd message");
    if (!is_memory(bytes, count)) return complain("exchanges memory that is not there");
    if (is_sent && std::getenv("STAND_IN_REFUSES_SENDS") != nullptr) return REFUSED;
    const int from = is_sent ? it.rank : peer, to = is_sent ? peer : it.rank;
    const int number = (is_sent ? it.sent : it.received)[peer]++;
    const std::string file = it.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
    messages.push_back({is_sent, peer, reinterpret_cast<unsigned char*>(bytes), count, file});
    of_group = shared(communicator);
    stream_of_group = stream;
    return OK;
}

}  // namespace

EXPORT Status ncclGetVersion(int* version) {
    const char* said = std::getenv("STAND_IN_NCCL");
    *version = said != nullptr ? std::atoi(said) : 23007;
    return OK;
}
EXPORT const char* ncclGetErrorString(Status) { return "an error of the stand-in"; }

EXPORT Status ncclGetUniqueId(char id[128]) {
    const char* folder = std::getenv("TMPDIR");
    std::snprintf(id, 128, "%s/nccl-XXXXXX", folder != nullptr ? folder : "/dev/shm");
    return mkdtemp(id) != nullptr ? OK : complain("cannot create a folder");
}

struct Id {
    char folder[128];
};

EXPORT Status ncclCommInitRank(void** communicator, int size, Id id, int rank) {
    if (!ready()) return INVALID;
    leave_at("STAND_IN_LEAVES", rank);
    auto it = std::make_shared<Communicator>(Communicator{id.folder, rank, size, std::vector<int>(size), std::vector<int>(size), std::vector<bool>(size)});
    if (!publish(it->folder + "/" + std::to_string(rank), "", 0)) return complain("cannot join");
    for (int peer = 0; peer < size; ++peer) {
        while (!exists(it->folder + "/" + std::to_string(peer))) usleep(1000);
    }
    *communicator = new std::shared_ptr<Communicator>(it);
    return OK;
}

EXPORT Status ncclCommGetAsyncError(void*, Status* status) {
    *status = OK;
    return OK;
}
EXPORT Status ncclCommAbort(void* communicator) {
    if (is_open) return complain("an abort in an open group");
    shared(communicator)->aborted = true;
    delete &shared(communicator);
    return OK;
}
EXPORT Status ncclCommDestroy(void* communicator) {
    const Communicator it = *shared(communicator);
    unlink((it.folder + "/" + std::to_string(it.rank)).c_str());
    for (int peer = 0; peer < it.size; ++peer) unlink(connection(it, it.rank, peer).c_str());
    // The last one removes the folder.
    rmdir(it.folder.c_str());
    delete &shared(communicator);
    return OK;
}

EXPORT Status ncclGroupStart() {
    if (is_open || !ready()) return complain("a group in a group");
    is_open = true;
    return OK;
}
EXPORT Status ncclSend(const void* bytes, size_t count, int type, int peer, void* communicator, void* stream) {
    return add(true, reinterpret_cast<Address>(bytes), count, type, peer, communicator, stream);
}
EXPORT Status ncclRecv(void* bytes, size_t count, int type, int peer, void* communicator, void* stream) {
    return add(false, reinterpret_cast<Address>(bytes), count, type, peer, communicator, stream);
}
EXPORT Status ncclGroupEnd() {
    if (!is_open) return complain("ends no group");
    is_open = false;
    if (messages.empty()) return OK;
    // The first group with another process connects both, and waits for it without a limit.
    Communicator& own = *of_group;
    leave_at("STAND_IN_LEAVES_GROUP", own.rank);
    for (const Message& message : messages) {
        if (!own.connected[message.peer] && !publish(connection(own, own.rank, message.peer), "", 0)) return complain("cannot connect");
    }
    for (const Message& message : messages) {
        while (!own.connected[message.peer] && !exists(connection(own, message.peer, own.rank))) usleep(1000);
        own.connected[message.peer] = true;
    }
    bool begun = false;
    auto work = [=, communicator = std::move(of_group), rest = std::move(messages)]() mutable -> Status {
        if (communicator->aborted) return OK;
        for (const Message& message : rest) {
            if (message.is_sent && !begun && !publish(message.file, message.bytes, message.count)) return complain("cannot send"), FAILED;
        }
        begun = true;
        std::vector<Message> waiting;
        for (const Message& message : rest) {
            const Status status = !message.is_sent ? receive(message) : exists(message.file) ? NOT_READY : OK;
            if (status == FAILED) return FAILED;
            if (status == NOT_READY) waiting.push_back(message);
        }
        rest = waiting;
        return rest.empty() ? OK : NOT_READY;
    };
    messages.clear();
    return enqueue(stream_of_group, std::move(work));
}
